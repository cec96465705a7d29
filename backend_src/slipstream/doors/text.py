"""Text to token ids and back. Streamed text never holds half a character, and its parts join to the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from slipstream.errors import InvalidRequest, ModelNotFound

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WORD_MARK = "\u2581"  # sentencepiece's
# No tokenizer of the supported families needs more bytes of ordinary text for one token.
_MOST_BYTES_PER_TOKEN = 32


class TextCodec:
    """A model's tokenizer."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelNotFound(f"{folder} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._max_bytes = max_model_len * _MOST_BYTES_PER_TOKEN
        bytes_by_name = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._byte_of = {token_id: byte for byte, token_id in enumerate(bytes_by_name) if token_id is not None}
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        # Byte-level tokenizers write each byte as one character; the others mark a word's beginning.
        is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        self._byte_of_character = _bytes_by_character() if is_byte_level else {}
        self._special_ids = {token_id for token_id, token in added.items() if token.special}

    def encode(self, text: bytes, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer itself adds unless told otherwise.

        Raises:
            InvalidRequest: not UTF-8, or too long to be tokenized.
        """
        if len(text) > self._max_bytes:
            raise InvalidRequest(f"{field} has {len(text)} bytes; at most {self._max_bytes} are allowed")
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{field} is not valid UTF-8: {error.reason} at byte {error.start}") from None
        ids: list[int] = self._tokenizer.encode(decoded, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences by which an answer may say a word: as it stands, and after a space."""
        spellings = (word, " " + word.lstrip())
        sequences = (tuple(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in spellings)
        return list(dict.fromkeys(sequence for sequence in sequences if sequence))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def ends_in_bytes(self, token_ids: list[int]) -> bool:
        """Whether the text ends with byte-fallback tokens, of which a run is read as a whole: UTF-8 or none of it."""
        for token_id in reversed(token_ids):
            if token_id not in self._special_ids:
                return token_id in self._byte_of
        return False

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, be they whole characters or not; a special token's are its name.

        Those of an answer's tokens join to its text, except that some tokenizers drop a space at its beginning.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id in self._byte_of:
            return bytes([self._byte_of[token_id]])
        piece = self._tokenizer.id_to_token(token_id) or ""  # none where the model has more rows than its tokenizer
        if self._byte_of_character:
            return bytes(self._byte_of_character[character] for character in piece)
        return piece.replace(_WORD_MARK, " ").encode()


def _bytes_by_character() -> dict[str, int]:
    """How byte-level BPE writes bytes (GPT-2): printable ones as themselves, the others from U+0100 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Detokenizer:
    """Turns one answer's token ids into text piece by piece; the pieces join to `codec.decode` of all ids."""

    def __init__(self, codec: TextCodec, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # from the last token that ended a piece, as context, to the newest
        self._context = 0  # how many of them are context

    def push(self, token_ids: list[int], last: bool) -> str:
        """The text that is complete with these ids; with the last ids, also what was held back."""
        self._ids.extend(token_ids)
        shown = self._codec.decode(self._ids[: self._context], self._skip_special_tokens)
        text = self._codec.decode(self._ids, self._skip_special_tokens)
        # Held back: a character of which not all bytes have come. And ids without text are no context for the next.
        if not last and (
            len(text) == len(shown) or text.endswith(_REPLACEMENT) or self._codec.ends_in_bytes(self._ids)
        ):
            return ""
        del self._ids[: self._context]
        self._context = len(self._ids)
        return text[len(shown) :]


class StopStrings:
    """Ends an answer's text at the first stop string, whichever tokens it begins and ends in.

    Text is held back only while it is the beginning of a stop string. A stop string counts if the token that completes
    it is number `min_tokens` or a later one; before that it is text like any other. Of several that one token
    completes, the one that begins first wins, then the shortest.

    Attributes:
        found: the stop string that has ended the text.
    """

    def __init__(self, stop: Sequence[str], include: bool, min_tokens: int) -> None:
        self.found: str | None = None
        self._stop = stop
        self._include = include
        self._min_tokens = min_tokens
        self._held = ""

    def push(self, text: str, num_tokens: int) -> str:
        """What can be shown, now that the answer's token `num_tokens` has brought `text`."""
        boundary = len(self._held)
        self._held += text
        if num_tokens >= self._min_tokens:
            places = [(self._held.find(stop, max(0, boundary - len(stop) + 1)), len(stop), stop) for stop in self._stop]
            places = [place for place in places if place[0] >= 0]
            if places:
                start, length, self.found = min(places)
                shown, self._held = self._held[: start + length * self._include], ""
                return shown
        longest = max((len(stop) for stop in self._stop), default=0)
        for kept in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-kept:]) for stop in self._stop):
                shown, self._held = self._held[:-kept], self._held[-kept:]
                return shown
        shown, self._held = self._held, ""
        return shown

    def rest(self) -> str:
        """What was held back, once the answer has ended."""
        rest, self._held = self._held, ""
        return rest
