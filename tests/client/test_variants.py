"""What can be compared, and the model repository that is made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from slipstream_client.comparison.variants import Variant, derive_repository, parse_variant, set_switches
from slipstream_client.errors import SlipstreamError
from slipstream_client.server.model_repository import find_repository, list_models


def read_config(model: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


@pytest.mark.parametrize(
    ("text", "name", "served_name", "switches"),
    [
        ("continuous", "continuous", "continuous", {}),
        ("dynamic, executor=transformers", "dynamic (transformers)", "dynamic-executor_transformers",
         {"executor": "transformers"}),
        ("continuous,prefix_cache=off", "continuous, prefix_cache=off", "continuous-prefix_cache_false",
         {"prefix_cache": "false"}),
        ("continuous,name=small,block_size=32", "small", "continuous-block_size_32", {"block_size": "32"}),
        ("continuous,target=generate_stream", "continuous, target=generate_stream", "continuous", {}),
    ],
)  # fmt: skip
def test_a_variant_is_a_model_with_switches(text: str, name: str, served_name: str, switches: dict[str, str]) -> None:
    variant = parse_variant(text)
    assert (variant.name, variant.served_name, dict(variant.switches)) == (name, served_name, switches)


def test_a_name_that_would_be_too_long_for_an_engine_is_a_hash() -> None:
    texts = (
        "continuous,max_num_seqs=32,kv_cache_bytes=1610612736",
        "continuous,max_num_seqs=32,kv_cache_bytes=1610612737",
    )
    first, second = (parse_variant(text).served_name for text in texts)
    assert first != second
    assert first == parse_variant("continuous,kv_cache_bytes=1610612736,max_num_seqs=32").served_name
    assert {len(first), len(second)} == {len("continuous-") + 8}


def test_another_server_is_a_variant_too() -> None:
    variant = parse_variant("llama-server,target=openai,url=http://127.0.0.1:8080,served_model=smollm2")
    assert variant == Variant("llama-server", "smollm2", {}, "openai", "http://127.0.0.1:8080")
    assert variant.served_name == "smollm2"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no model"),
        ("prefix_cache=off", "names no model"),
        ("continuous,prefix_cache", "'prefix_cache' is no SWITCH=VALUE"),
        ("continuous,prefix_cache=", "'prefix_cache=' is no SWITCH=VALUE"),
        ("continuous,block_size=16,block_size=32", "gives block_size twice"),
        ("continuous,target=carrier-pigeon", "target is 'carrier-pigeon'; allowed are grpc, generate_stream, infer"),
        ("x,target=openai", "a server of its own needs url="),
        ("x,url=http://a,block_size=32", "block_size cannot be set at another server"),
    ],
)
def test_what_is_no_variant_is_refused(text: str, told: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        parse_variant(text)
    assert told in str(refused.value)


def test_every_variant_gets_a_model_and_an_engine_of_its_own(tmp_path: Path) -> None:
    source = find_repository()
    variants = [parse_variant(text) for text in ("continuous", "continuous,prefix_cache=off", "dynamic")]
    derive_repository(source, variants, tmp_path)
    assert list_models(tmp_path) == ["admin", "continuous", "continuous-prefix_cache_false", "dynamic"]
    original, changed = read_config(tmp_path / "continuous"), read_config(tmp_path / "continuous-prefix_cache_false")
    assert (tmp_path / "continuous/config.pbtxt").read_bytes() == (source / "continuous/config.pbtxt").read_bytes()
    assert changed.name == changed.parameters["name"].string_value == "continuous-prefix_cache_false"
    assert changed.parameters["prefix_cache"].string_value == "false"
    # And nothing else is different.
    changed.name = original.name
    for key in ("name", "prefix_cache"):
        changed.parameters[key].string_value = original.parameters[key].string_value
    assert changed == original
    assert (tmp_path / "dynamic/1/model.py").is_file()


def test_the_dynamic_batcher_is_set_in_its_configuration(tmp_path: Path) -> None:
    derive_repository(find_repository(), [parse_variant("dynamic,max_batch_size=4")], tmp_path)
    model = tmp_path / "dynamic-max_batch_size_4"
    set_switches(model, {"max_queue_delay_microseconds": "5000"})
    config = read_config(model)
    assert (config.max_batch_size, config.dynamic_batching.max_queue_delay_microseconds) == (4, 5000)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kontinuous", "no model 'kontinuous' in"),
        ("admin", "no model 'admin' in"),
        ("continuous,prefix_cash=off", "unknown parameter 'prefix_cash'"),
        ("continuous,block_size=7", "block_size is 7; allowed are 8 to 256"),
        ("continuous,max_queue_delay_microseconds=5", "has no dynamic batcher"),
        ("continuous,max_batch_size=5", "cannot have that many"),
        ("dynamic,max_batch_size=many", "max_batch_size is 'many'; it must be a whole number"),
    ],
)
def test_a_switch_that_the_model_does_not_have_is_refused_before_it_is_loaded(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(SlipstreamError) as refused:
        derive_repository(find_repository(), [parse_variant(text)], tmp_path)
    assert told in str(refused.value)
