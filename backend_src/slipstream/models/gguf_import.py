"""Convert a GGUF file, once, to a folder in Hugging Face's layout: safetensors, configuration and tokenizer.

Weights are stored as float32. A quantised GGUF holds, for each block of weights, a scale and an offset whose product
and sum need more bits than float16 has (its norms are float32 outright), so float32 keeps exactly the values that the
file stands for. The runner packs them to float16 by default; its float32 option is then the unrounded reference.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts whose ids must come out equal from the tokenizer as loaded and as saved.
_PROBES = (
    "The capital of France is Paris.",
    "x =   5 and 1234\n\tdef f(a1): pass",
    "Zoë paid 3½ € at the café 🚀",
    "<|im_start|>user\nHi<|im_end|>\n",
)


class ConversionFailed(SlipstreamError):
    """A GGUF file that cannot be converted here; the text says why."""


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What the header of a GGUF file tells before its weights are read."""

    quantization: str  # storage type of most of its matrices, such as "Q4_1"
    pre_tokenizer: str  # the rule by which its tokenizer splits text first, such as "smollm"
    chat_template: str | None
    needed_bytes: int  # size of its weights as float32


def summarize_gguf(gguf: Path) -> GgufSummary:
    """Read the header of a GGUF file.

    Raises:
        ConversionFailed: not a GGUF file, or the package `gguf` is not installed.
    """
    with _requirements_explained():
        from gguf import GGUFReader
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError) as error:
        raise ConversionFailed(f"{gguf} is not a GGUF file that can be read: {error}") from error

    def text(key: str) -> str | None:
        field = reader.get_field(key)
        return None if field is None else str(field.contents())

    types = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    return GgufSummary(
        quantization=types.most_common(1)[0][0] if types else "F32",
        pre_tokenizer=text("tokenizer.ggml.pre") or "default",
        chat_template=text("tokenizer.chat_template"),
        needed_bytes=sum(int(tensor.n_elements) * 4 for tensor in reader.tensors),
    )


def convert_gguf(gguf: Path, folder: Path) -> GgufSummary:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`.

    Takes half a minute and 2 GB of memory for a model of 135 million parameters.

    Raises:
        ConversionFailed: something is not installed, transformers does not know the architecture, or the tokenizer that
            was written does not give the ids of the one that was read.
    """
    summary = summarize_gguf(gguf)
    with _requirements_explained():
        import accelerate  # noqa: F401  transformers needs it here and would only say so in a traceback
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _quiet_transformers():
        try:
            loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**source)
        except (ValueError, KeyError, NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the file system's, not transformers' own
            reason = " ".join(str(error).split())[:300]
            raise ConversionFailed(f"transformers cannot read {gguf.name}: {reason}") from error
        config = loaded.config
        config.__dict__.pop("quantization_config", None)
        # A model that was loaded quantised refuses to be saved; one built from its configuration does not. On the meta
        # device it takes no memory of its own, and `assign` gives it the loaded tensors instead of copies.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer.model_max_length = config.max_position_embeddings
        _mend_pre_tokenizer(tokenizer, summary.pre_tokenizer)
        tokenizer.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors makes it its owner's alone
    _check_tokenizer(folder, tokenizer, summary)
    return summary


def _mend_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, rule: str) -> None:
    """Split digits one by one before anything else where the file says "smollm".

    transformers takes GPT-2's rule for every GGUF file with a GPT-2 vocabulary, and then cuts white space before a
    digit otherwise than in training ("x =   5"). Source of the rule: LLAMA_VOCAB_PRE_TYPE_SMOLLM in llama.cpp's
    llama-vocab.cpp.
    """
    if rule != "smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, summary: GgufSummary) -> None:
    """Require of the written files what the doors rely on: equal ids, one id for each special token, the template."""
    from tokenizers import Tokenizer

    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in _PROBES:
        if saved.encode(text).ids != tokenizer(text)["input_ids"]:
            raise ConversionFailed(f"the tokenizer that was written gives other ids for {text!r} than the one read")
    config = json.loads((folder / "config.json").read_text())
    for role in ("bos", "eos"):
        token_id = config.get(f"{role}_token_id")
        token = None if token_id is None else saved.id_to_token(token_id)
        if token_id is not None and (token is None or saved.encode(token, add_special_tokens=False).ids != [token_id]):
            raise ConversionFailed(
                f"the {role} token {token_id} of the configuration is not one token of the tokenizer"
            )
    template = folder / "chat_template.jinja"
    if summary.chat_template is not None and not (template.exists() and template.read_text() == summary.chat_template):
        raise ConversionFailed("the chat template of the GGUF file did not reach the folder")


@contextmanager
def _requirements_explained() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConversionFailed(
            f"converting a GGUF file needs {error.name}: run `pip install 'slipstream-triton[server]'`"
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and advice off a screen that shows one progress line of our own."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
