"""Every name for a model resolves to a folder that can be loaded, or says what is missing and what mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.errors import ModelNotFound
from slipstream.models import store


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_folder_with_all_parts_resolves_to_itself(models: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()

    assert store.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, r"has no \*\.safetensors"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, r"pickled weights \(pytorch_model\.bin\).*save_pretrained"),
        ({"config.json": "{}", "model.gguf": ""}, r"give the GGUF file itself: .*model\.gguf"),
        ({"config.json": "{}", "model.safetensors": ""}, "no tokenizer.json.*save_pretrained"),
        (
            {
                "config.json": "{}",
                "1.safetensors": "",
                "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
            },
            "lacks 1 of 2 shards, such as 2.safetensors",
        ),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "is damaged"),
    ],
)
def test_a_folder_that_lacks_something_says_what(
    models: Path, tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(ModelNotFound, match=message):
        store.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m", "run `slipstream model pull smollm2-135m`"),
        ("slipstream-tests/no-such-model", "run `slipstream model pull slipstream-tests/no-such-model`"),
        ("smollm3", r"no model or folder 'smollm3'; built in is smollm2-135m"),
        ("/no/such/folder", "no model or folder '/no/such/folder'"),
        ("", "no model or folder ''"),
        (__file__, r"test_store_resolve\.py is a file"),
    ],
)
def test_a_name_that_is_nothing_says_what_mends_it(models: Path, name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        store.resolve(name)
