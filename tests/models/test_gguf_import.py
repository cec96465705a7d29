"""A converted GGUF file has the weights, the tokenizer, the special tokens and the template of the file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.models import gguf_import, store
from slipstream.models.gguf_import import ConversionFailed


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder of an empty cache."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer with random weights and a byte-level tokenizer that follows SmolLM's rule."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ĠĠ", "ĠĠĠ"]
    hidden, intermediate, random = 32, 64, numpy.random.default_rng(0)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(special) + [1] * (len(vocabulary) - len(special)))
    writer.add_token_merges(["Ġ Ġ", "ĠĠ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    shapes = {
        "token_embd": (len(vocabulary), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (16, hidden),
        "blk.0.attn_v": (16, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (intermediate, hidden),
        "blk.0.ffn_up": (intermediate, hidden),
        "blk.0.ffn_down": (hidden, intermediate),
    }
    for name, shape in shapes.items():
        weights = random.standard_normal(shape, dtype=numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weights)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the GGUF file becomes when its path is resolved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = store.resolve(str(gguf_file))
        patch.setattr(gguf_import, "convert_gguf", lambda gguf, folder: pytest.fail("converted twice"))
        assert store.resolve(str(gguf_file)) == folder
        assert store.resolve(folder.name) == folder
    return folder


def test_converted_weights_are_exactly_those_of_the_gguf_file(gguf_file: Path, converted: Path) -> None:
    import gguf
    import numpy
    from safetensors.numpy import load_file

    weights = load_file(converted / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    }
    for ours, theirs in pairs.items():
        expected = gguf.dequantize(tensors[ours].data, tensors[ours].tensor_type)
        assert weights[theirs].dtype == numpy.float32
        numpy.testing.assert_array_equal(weights[theirs], expected)
    assert json.loads((converted / "slipstream.json").read_text())["quantization"] == "Q4_1"


def test_converted_files_carry_the_special_tokens_and_the_template(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    generation = json.loads((converted / "generation_config.json").read_text())

    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert json.loads((converted / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert (converted / "chat_template.jinja").read_text() == "{{ messages }}"
    assert os.stat(converted / "model.safetensors").st_mode == os.stat(converted / "config.json").st_mode


def test_the_converted_tokenizer_splits_digits_as_smollm_was_trained(converted: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>x   42<|im_end|>").tokens == [
        "<|im_start|>",
        "x",
        "ĠĠĠ",
        "4",
        "2",
        "<|im_end|>",
    ]
    for text in ("Zoë paid 3½ € 🚀\n", "  12  ab", "<|im_start|>user\nHi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_file_that_is_no_gguf_is_refused_and_nothing_kept(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "junk.gguf"
    path.write_bytes(b"not a model" * 100)

    with pytest.raises(ConversionFailed, match=r"junk\.gguf is not a GGUF file"):
        store.resolve(str(path))
    assert not models.exists()


def test_a_conversion_without_its_packages_names_the_extra(
    models: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(SlipstreamError, match=r"needs gguf: run `pip install 'slipstream-triton\[server\]'`"):
        store.resolve(str(gguf_file))
