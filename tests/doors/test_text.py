"""Text in and out: streamed pieces join to the whole text, and none of them holds half a character.

Both kinds of tokenizers of the supported families are built here in small: byte-level BPE (Llama 3, Qwen, SmolLM) and
sentencepiece style with byte fallback (Llama 2, Mistral).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.doors.text import Detokenizer, StopStrings, TextCodec
from slipstream.errors import InvalidRequest, ModelNotFound

# Characters that look like others are what this is about.
# ruff: noqa: RUF001
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CORPUS = [
    "I am fine, thank you. The quick brown fox jumps over the lazy dog.\n\n  indented\tcode();",
    "你好，世界。今天天气很好。日本語のテキストです。한국어 문장입니다.",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 🌶️ pepper, e\u0301 combining, ñ, ﷽, क्षि",
    "Зачем? Ğüzel ışık. שלום עולם مرحبا بالعالم",
]


def save_byte_level(folder: Path) -> TextCodec:
    """Byte-level BPE with few merges, so that most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder, max_model_len=64)


def save_byte_fallback(folder: Path) -> TextCodec:
    """Sentencepiece style: words begin with a lower one-eighth block, what is not in the vocabulary is bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghilmnorstuvIT.,"]
    merges = [("▁", "t"), ("▁", "a"), ("▁", "f"), ("a", "m"), ("▁a", "m"), ("i", "n"), ("in", "e"), ("▁f", "ine")]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder, max_model_len=64)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    return {
        "byte level": save_byte_level(tmp_path_factory.mktemp("byte-level")),
        "byte fallback": save_byte_fallback(tmp_path_factory.mktemp("byte-fallback")),
    }


KINDS = ["byte level", "byte fallback"]
VOCABULARY = {"byte level": 320, "byte fallback": 288}


def stream(codec: TextCodec, token_ids: list[int], cuts: list[int] | None = None) -> list[str]:
    """The pieces of text as tokens come one by one, or in groups that end at `cuts`."""
    detokenizer = Detokenizer(codec)
    ends = sorted({cut for cut in cuts if 0 < cut < len(token_ids)}) if cuts is not None else range(1, len(token_ids))
    bounds = [0, *ends, len(token_ids)]
    groups = [token_ids[start:end] for start, end in itertools.pairwise(bounds)]
    return [detokenizer.push(group, last=number == len(groups) - 1) for number, group in enumerate(groups)]


# --- streaming


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", CORPUS)
def test_pieces_join_to_the_whole_text_and_hold_whole_characters(
    codecs: dict[str, TextCodec], kind: str, text: str
) -> None:
    """TXT-04, TXT-06: CJK, emoji sequences, flags and combining marks, in both kinds of tokenizers."""
    codec = codecs[kind]
    token_ids = codec.encode(text.encode(), "text_input")
    assert len(token_ids) > len(text.split())
    pieces = stream(codec, token_ids)
    assert "".join(pieces) == codec.decode(token_ids) == text
    assert REPLACEMENT not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 1


@settings(max_examples=300)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_pieces_of_any_tokens_join_to_the_whole_text(
    codecs: dict[str, TextCodec], kind: str, data: st.DataObject
) -> None:
    """Stray bytes, special tokens in the middle, tokens in groups of any size: what a model may give at any step."""
    token_ids = data.draw(st.lists(st.integers(0, VOCABULARY[kind] - 1), min_size=1, max_size=12))
    cuts = data.draw(st.lists(st.integers(1, 12), max_size=12))
    codec = codecs[kind]
    whole = codec.decode(token_ids)
    assert "".join(stream(codec, token_ids)) == whole
    assert "".join(stream(codec, token_ids, cuts)) == whole


def bytes_as_tokens(codec: TextCodec, kind: str, data: bytes) -> list[int]:
    """One token for each byte."""
    tokenizer = codec._tokenizer
    if kind == "byte fallback":
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    alphabet = byte_alphabet()
    return [tokenizer.token_to_id(alphabet[byte]) for byte in data]


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stray_byte_after_a_whole_character_reads_the_same_in_pieces_and_whole(
    codecs: dict[str, TextCodec], kind: str
) -> None:
    """TXT-12: E4 BD A0 is a character, FF is none; then an ordinary token. Nothing already sent changes."""
    codec = codecs[kind]
    token_ids = [*bytes_as_tokens(codec, kind, b"\xe4\xbd\xa0\xff"), *codec.encode(b"a", "text_input")[-1:]]
    # Byte fallback reads a run of bytes as a whole: one that is not UTF-8 is a replacement character for each byte.
    whole = "你" + REPLACEMENT + "a" if kind == "byte level" else 4 * REPLACEMENT + " a"
    assert "".join(stream(codec, token_ids)) == codec.decode(token_ids) == whole


@pytest.mark.parametrize(("kind", "replacements"), [("byte level", 1), ("byte fallback", 3)])
def test_the_last_piece_gives_what_was_held_back(codecs: dict[str, TextCodec], kind: str, replacements: int) -> None:
    """TXT-07: the answer ends after three of the four bytes of a character."""
    codec = codecs[kind]
    token_ids = bytes_as_tokens(codec, kind, "🌶".encode()[:3])
    assert stream(codec, token_ids) == ["", "", replacements * REPLACEMENT]
    assert codec.decode(token_ids) == replacements * REPLACEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_comes_with_its_last_byte_or_the_next_token(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    token_ids = [*bytes_as_tokens(codec, kind, "🌶".encode()), *bytes_as_tokens(codec, kind, b"!")]
    pieces = stream(codec, token_ids)
    assert pieces[:3] == ["", "", ""]
    assert "".join(pieces) == "🌶!"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_answer_that_ends_a_character_of_the_prompt_begins_with_its_own_first_token(
    codecs: dict[str, TextCodec], kind: str, num_bytes: int
) -> None:
    """TXT-01: the prompt's ids end within a character; whole or in pieces the text is that of the answer's ids."""
    codec = codecs[kind]
    pepper = bytes_as_tokens(codec, kind, "🌶".encode())
    prompt = [*codec.encode(b"Hello world ", "text_input"), *pepper[:num_bytes]]
    answer = [*pepper[num_bytes:], *bytes_as_tokens(codec, kind, b"!"), *codec.encode(b" am", "text_input")[-1:]]
    assert codec.decode(prompt + answer).startswith("Hello world 🌶!"), "together they are text"
    text = "".join(stream(codec, answer))
    assert text == codec.decode(answer)
    assert text.startswith(REPLACEMENT)
    assert "Hello" not in text
    assert "world" not in text


def test_a_space_after_a_special_token_is_kept(codecs: dict[str, TextCodec]) -> None:
    """A sentencepiece decoder strips the first space of the whole text, and of no later piece."""
    codec = codecs["byte fallback"]
    am, fine, end = (codec._tokenizer.token_to_id(piece) for piece in ("▁am", "▁fine", "</s>"))
    assert stream(codec, [am, end, fine]) == ["am", "", " fine"]
    assert codec.decode([am, end, fine]) == "am fine"


def test_special_tokens_are_no_text(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte level"]
    end = codec._tokenizer.token_to_id("<|end|>")
    token_ids = codec.encode(b"fine", "text_input")
    assert "".join(stream(codec, [*token_ids, end])) == "fine"
    assert stream(codec, [end]) == [""]


# --- encoding


def test_a_prompt_gets_the_special_tokens_that_its_tokenizer_adds_and_no_others(codecs: dict[str, TextCodec]) -> None:
    """TPL-01: exactly one beginning-of-sequence token where the tokenizer has one, none where it has not."""
    fallback, level = codecs["byte fallback"], codecs["byte level"]
    assert fallback.encode(b"am", "text_input") == [1, fallback._tokenizer.token_to_id("▁am")]
    assert level.encode(b"", "text_input") == []
    assert level.decode(level.encode(b"am", "text_input")) == "am"


@pytest.mark.parametrize(
    ("data", "where"),
    [(b"\xff\xfe", "byte 0"), (b"abc\x80", "byte 3"), (b"ab\xed\xa0\xbd", "byte 2"), ("é".encode()[:1], "byte 0")],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_place(
    codecs: dict[str, TextCodec], data: bytes, where: str
) -> None:
    """VAL-07: also lone surrogates and half a character."""
    with pytest.raises(InvalidRequest, match=f"text_input is not valid UTF-8: .* at {where}"):
        codecs["byte level"].encode(data, "text_input")


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenized(codecs: dict[str, TextCodec]) -> None:
    """VAL-07: ten megabytes; the limit is on bytes, so it costs nothing."""
    with pytest.raises(InvalidRequest, match="text_input has 10000000 bytes; at most 2048 are allowed"):
        codecs["byte level"].encode(b"a" * 10_000_000, "text_input")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no tokenizer.json"):
        TextCodec(tmp_path, 64)


# --- stop strings


def cut(pieces: list[str], stop: list[str], include: bool = False, min_tokens: int = 0) -> tuple[str, str | None]:
    """The text shown of pieces that come one with each token, and the stop string that ended it."""
    stops = StopStrings(stop, include, min_tokens)
    shown = ""
    for number, piece in enumerate(pieces, start=1):
        shown += stops.push(piece, number)
        if stops.found is not None:
            return shown, stops.found
    return shown + stops.rest(), None


def reference_cut(pieces: list[str], stop: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """The same by the contract's words: after each token look at the whole text."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        before, text = len(text), text + piece
        completed = [
            (start, len(each), each)
            for each in stop
            for start in range(len(text))
            if text.startswith(each, start) and start + len(each) > before
        ]
        if completed and number >= min_tokens:
            start, length, found = min(completed)
            return text[: start + length if include else start], found
    return text, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    st.booleans(),
    st.integers(0, 6),
)
def test_a_stop_string_cuts_at_the_same_place_however_the_text_comes(
    pieces: list[str], stop: list[str], include: bool, min_tokens: int
) -> None:
    """STP-11, STP-14: across tokens, at the first token, one inside the other; what is shown is never taken back."""
    assert cut(pieces, stop, include, min_tokens) == reference_cut(pieces, stop, include, min_tokens)


def test_no_character_of_a_stop_string_is_shown() -> None:
    """STP-01: not while it comes, either; where the text goes another way, all of it is shown."""
    stops = StopStrings(["DEFGHIJ"], False, 0)
    assert [stops.push(piece, 1) for piece in ("abcDEF", "G", "HI", "J")] == ["abc", "", "", ""]
    assert stops.found == "DEFGHIJ"
    assert cut(["DEF", "G", "X"], ["DEFGHIJ"]) == ("DEFGX", None)
    assert cut(["DEF", "G"], ["DEFGHIJ"]) == ("DEFG", None)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    """STP-03: not as many characters as the longest stop string has."""
    stops = StopStrings(["xyzxyw", "<end>"], False, 0)
    assert [stops.push(piece, 1) for piece in ("hello", " x", "yzx", "a<", "b")] == ["hello", " ", "", "xyzxa", "<b"]


@pytest.mark.parametrize(
    ("min_tokens", "shown", "found"), [(0, "a", "\n"), (2, "a", "\n"), (3, "a\nb", "\n"), (5, "a\nb\nc", None)]
)
def test_a_stop_string_before_min_tokens_is_text_like_any_other(min_tokens: int, shown: str, found: str | None) -> None:
    """STP-05: the first one that is completed by token `min_tokens` or a later one counts."""
    assert cut(["a", "\n", "b\n", "c"], ["\n"], min_tokens=min_tokens) == (shown, found)


@pytest.mark.parametrize("kind", KINDS)
def test_text_held_back_before_a_skipped_stop_token_is_shown(codecs: dict[str, TextCodec], kind: str) -> None:
    """STP-09: `abc` may still begin a stop string when the token comes that ends the answer and is no text."""
    codec = codecs[kind]
    end = codec._tokenizer.token_to_id("<|end|>" if kind == "byte level" else "</s>")
    pieces = stream(codec, [*bytes_as_tokens(codec, kind, b"abc"), end])
    assert cut(pieces, ["abcd", "bcx"]) == ("abc", None)
    assert codec.decode([*bytes_as_tokens(codec, kind, b"abc"), end], skip_special_tokens=False).startswith("abc<")


def test_of_two_that_end_together_the_first_and_then_the_shorter_wins() -> None:
    """STP-14."""
    assert cut(["abc"], ["bc", "ab", "abc"]) == ("", "ab")
    assert cut(["xabc"], ["c", "bc"]) == ("xa", "bc")
    assert cut(["xabc"], ["c", "bc"], include=True) == ("xabc", "bc")


# --- other choices


@pytest.mark.parametrize("word", ["cat", " cat", "Éclair", "猫"])
def test_a_word_is_known_as_it_stands_and_after_a_space(codecs: dict[str, TextCodec], word: str) -> None:
    codec = codecs["byte level"]
    sequences = codec.encode_word(word)
    assert codec.decode(list(sequences[0])) == word
    assert {codec.decode(list(sequence)) for sequence in sequences} == {word, " " + word.lstrip()}


def test_special_tokens_are_kept_on_request(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte level"]
    ids = [*codec.encode(b"fine", "text"), codec._tokenizer.token_to_id("<|end|>")]
    for skip, text in ((True, "fine"), (False, "fine<|end|>")):
        detokenizer = Detokenizer(codec, skip)
        pieces = [detokenizer.push([token_id], last=False) for token_id in ids] + [detokenizer.push([], last=True)]
        assert "".join(pieces) == codec.decode(ids, skip) == text
