"""The search for the dynamic batcher's best settings, against a server whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from slipstream_client.comparison.tuning import grid, is_tunable, tune
from slipstream_client.comparison.variants import Variant, derive_repository, parse_variant
from slipstream_client.server.model_repository import find_repository

DYNAMIC, TRANSFORMERS = parse_variant("dynamic"), Variant("other", "dynamic", {"block_size": "32"})


def settings_of(repository: Path, variant: Variant) -> tuple[int, int]:
    text = (repository / variant.served_name / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return config.dynamic_batching.max_queue_delay_microseconds, config.max_batch_size


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    derive_repository(find_repository(), [DYNAMIC, TRANSFORMERS], tmp_path)
    return tmp_path


def test_all_pairs_are_tried_and_all_variants_get_the_best(repository: Path) -> None:
    loaded: list[tuple[str, tuple[int, int]]] = []
    rates = {(0, 16): 50.0, (20_000, 8): 70.0}  # the others: 60

    def load(variant: Variant) -> None:
        loaded.append((variant.name, settings_of(repository, variant)))

    def measure(variant: Variant, said: str) -> dict[str, Any]:
        delay, size = settings_of(repository, variant)
        assert said == f"max_queue_delay {delay // 1000} ms, max_batch_size {size}"
        return {"output_tokens_per_s": rates.get((delay, size), 60.0), "mean_batch": 3.0, "failures": 0, "more": 1}

    tuning = tune([DYNAMIC, TRANSFORMERS], repository, 16, load, measure)
    tried = [(delay, size) for size in (16, 8) for delay in (0, 20_000)]
    assert [(each["max_queue_delay_microseconds"], each["max_batch_size"]) for each in tuning["grid"]] == tried
    assert tuning["chosen"] == {"max_queue_delay_microseconds": 20_000, "max_batch_size": 8}
    assert tuning["grid"][0] == {
        "max_queue_delay_microseconds": 0,
        "max_batch_size": 16,
        "output_tokens_per_s": 50.0,
        "mean_batch": 3.0,
        "failures": 0,
    }
    assert loaded == [("dynamic", each) for each in tried] + [("dynamic", (20_000, 8)), ("other", (20_000, 8))]
    assert (tuning["variants"], tuning["tried_with"]) == (["dynamic", "other"], "dynamic")


def test_settings_under_which_requests_fail_are_not_chosen(repository: Path) -> None:
    def measure(variant: Variant, said: str) -> dict[str, Any]:
        delay, size = settings_of(repository, variant)
        best = (delay, size) == (0, 16)
        return {"output_tokens_per_s": 90.0 if best else float(size), "mean_batch": None, "failures": int(best)}

    tuning = tune([DYNAMIC], repository, 16, lambda variant: None, measure)
    assert tuning["chosen"] == {"max_queue_delay_microseconds": 20_000, "max_batch_size": 16}


def test_a_batch_of_one_is_not_halved() -> None:
    assert [each["max_batch_size"] for each in grid(1)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dynamic", True),
        ("dynamic,executor=transformers", True),
        ("dynamic,max_batch_size=4", False),
        ("dynamic,max_queue_delay_microseconds=0", False),
        ("dynamic,url=somewhere:8001", False),
        ("static", False),
        ("continuous", False),
    ],
)
def test_what_was_set_by_hand_is_left_alone(text: str, expected: bool) -> None:
    assert is_tunable(parse_variant(text)) == expected
