"""Log-probabilities as a client reads them: every token by its bytes and its own name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream.doors.logprobs import logprobs_json
from slipstream.doors.text import TextCodec
from slipstream.engine.request import TokenLogprobs

TEXT = "\n\nHéllo 你好 🌶🌶!\n"


@pytest.fixture
def byte_level(tmp_path: Path) -> TextCodec:
    """One token for each byte, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return save(tokenizer, tmp_path)


@pytest.fixture
def byte_fallback(tmp_path: Path) -> TextCodec:
    """Words of sentencepiece's kind, and a token for each byte of what they do not spell."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {"\u2581": 257, "H": 258, "l": 259, "o": 260}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tokenizer, tmp_path)


def read_entry(scores: TokenLogprobs, codec: TextCodec) -> dict[int, dict[str, Any]]:
    """The one entry of a list, in its order."""
    (entry,) = json.loads(logprobs_json([scores], codec))
    return {int(token_id): members for token_id, members in entry.items()}


def save(tokenizer: Tokenizer, folder: Path) -> TextCodec:
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder, 4096)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_of_the_entries_join_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """TXT-08, TXT-11: newlines first, characters split over tokens; sentencepiece's first word brings its space."""
    codec: TextCodec = request.getfixturevalue(kind)
    ids = codec.encode(TEXT.encode(), "text_input")
    entries = [read_entry(TokenLogprobs([token_id], [-1.0], 1), codec)[token_id] for token_id in ids]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode().removeprefix(" " if kind == "byte_fallback" else "") == TEXT
    assert codec.decode(ids) == TEXT


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_two_tokens_look_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    """TXT-08: parts of characters all show as U+FFFD; their bytes differ."""
    codec: TextCodec = request.getfixturevalue(kind)
    ids = range(256) if kind == "byte_level" else range(1, 257)
    entries = read_entry(TokenLogprobs(list(ids), [-1.0] * 256, 1), codec)
    looks = {(entry["decoded_token"], tuple(entry["bytes"])) for entry in entries.values()}
    assert len(looks) == 256
    assert sum(entry["decoded_token"] == "\ufffd" for entry in entries.values()) == 128


def test_a_special_token_has_its_name_among_the_candidates(byte_level: TextCodec) -> None:
    """TXT-09: also where the text skips it."""
    special = 256
    assert byte_level.decode([special]) == ""
    entry = read_entry(TokenLogprobs([7, special], [-2.0, -0.5], 3), byte_level)
    assert entry[special] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": "<|im_end|>",
        "bytes": list(b"<|im_end|>"),
    }


def test_the_token_itself_comes_first_with_its_own_rank(byte_level: TextCodec) -> None:
    """CHK-04: in the list of the likeliest or not."""
    outside = read_entry(TokenLogprobs([9, 3, 4], [-4.0, -0.1, -2.0], 17), byte_level)
    assert [(token_id, entry["rank"]) for token_id, entry in outside.items()] == [(9, 17), (3, 1), (4, 2)]
    inside = read_entry(TokenLogprobs([4, 3, 4], [-2.0, -0.1, -2.0], 2), byte_level)
    assert [(token_id, entry["rank"]) for token_id, entry in inside.items()] == [(4, 2), (3, 1)]


def test_a_list_has_one_place_for_each_token_and_null_where_nothing_is_known(byte_level: TextCodec) -> None:
    scored = [None, TokenLogprobs([65], [-1e-7], 1), TokenLogprobs([66], [-30.5], 40)]
    nothing, *entries = json.loads(logprobs_json(scored, byte_level))
    assert nothing is None
    assert [list(entry) for entry in entries] == [["65"], ["66"]]
    assert [member["logprob"] for entry in entries for member in entry.values()] == [-1e-7, -30.5]
    assert json.loads(logprobs_json([], byte_level)) == []
