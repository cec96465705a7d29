"""Packed weights kept on the disk: the same bits as packed anew, never those of another model, never half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.models import packed_store, prepare
from slipstream.models.cpu_weights import pack_weights
from slipstream.models.kernels.cpu_step import Weights
from slipstream.models.loading import load_runner
from slipstream.models.packed_store import is_kept, keep_packed, load_weights, packed_folder, read_packed
from slipstream.models.weights import Checkpoint, ModelConfig
from tiny_model import make_config


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder of this test's own, and a cache folder too."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def assert_equal(found: Weights, expected: Weights) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            for part, same in zip(one, other, strict=True):
                assert part.dtype == same.dtype
                np.testing.assert_array_equal(part, same)


@pytest.mark.parametrize("storage", ["fp16", "fp32", "int8"])
def test_kept_weights_are_those_that_are_packed(model: Path, storage: str) -> None:
    config = ModelConfig.from_folder(model)
    packed = pack_weights(config, Checkpoint(model), storage)
    assert read_packed(model, storage) is None
    assert not is_kept(model, storage)
    keep_packed(model, storage)
    assert is_kept(model, storage)
    arrays = read_packed(model, storage)
    assert arrays is not None
    assert_equal(load_weights(config, model, storage, arrays), packed)
    assert_equal(load_weights(config, model, storage), packed)


def test_another_storage_is_not_kept_with_it(model: Path) -> None:
    keep_packed(model, "fp16")
    assert not is_kept(model, "int8")


def test_a_model_that_has_changed_is_packed_again(model: Path) -> None:
    folder = keep_packed(model, "fp16")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # the same bytes at another time: no reason to look into them
    assert read_packed(model, "fp16") is None
    assert keep_packed(model, "fp16") == folder
    assert is_kept(model, "fp16")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert not is_kept(model, "fp16")


def test_two_models_of_one_name_are_kept_apart(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "elsewhere" / "model"))
    assert packed_folder(model, "fp16") != packed_folder(other, "fp16")
    keep_packed(model, "fp16")
    assert not is_kept(other, "fp16")


def test_what_was_not_finished_counts_for_nothing(model: Path) -> None:
    folder = packed_folder(model, "fp16")
    folder.mkdir(parents=True)
    np.save(folder / "embedding.npy", np.zeros(3))
    assert read_packed(model, "fp16") is None
    (folder / "packed.json").write_text("{")
    assert read_packed(model, "fp16") is None
    keep_packed(model, "fp16")
    assert is_kept(model, "fp16")


def test_an_engine_reads_what_is_kept_and_packs_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_packed(model, "fp16")
    monkeypatch.setattr("slipstream.models.cpu_weights.pack_weights", lambda *_: pytest.fail("packed again"))
    assert load_runner(make_config(model=str(model))).batch_invariant


def test_a_prepared_model_has_nothing_left_to_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    done: list[str] = []
    monkeypatch.setattr("slipstream.models.runner.ModelRunner", lambda config, folder: done.append(config.weights))

    def note(phase: str, *_: Any) -> None:
        phases.append(phase)

    prepare.prepare(model, "int8", note)
    assert (phases, done) == (["pack", "compile"], ["int8"])
    assert is_kept(model, "int8")
    prepare.prepare(model, "int8", lambda phase, *_: pytest.fail(f"did {phase} again"))


def test_where_cuda_is_used_nothing_is_packed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.runner.choose_device", lambda device: "cuda")
    prepare.prepare(model, "auto", lambda phase, *_: pytest.fail(f"began to {phase}"))
    assert not packed_store.is_kept(model, "fp16")
