"""Text to token ids and back. Streamed text never holds half a character, and its parts join to the whole text."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from slipstream.errors import InvalidRequest, ModelNotFound

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
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

    def encode(self, text: bytes, field: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer itself adds.

        Raises:
            InvalidRequest: not UTF-8, or too long to be tokenized.
        """
        if len(text) > self._max_bytes:
            raise InvalidRequest(f"{field} has {len(text)} bytes; at most {self._max_bytes} are allowed")
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{field} is not valid UTF-8: {error.reason} at byte {error.start}") from None
        ids: list[int] = self._tokenizer.encode(decoded).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids)
        return text


class Detokenizer:
    """Turns one answer's token ids into text piece by piece; the pieces join to `codec.decode` of all ids."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []  # from the last token that ended a piece, as context, to the newest
        self._context = 0  # how many of them are context

    def push(self, token_ids: list[int], last: bool) -> str:
        """The text that is complete with these ids; with the last ids, also what was held back."""
        self._ids.extend(token_ids)
        shown = self._codec.decode(self._ids[: self._context])
        text = self._codec.decode(self._ids)
        if not last and text.endswith(_REPLACEMENT):
            return ""  # a character of which not all bytes have come
        del self._ids[: self._context]
        self._context = len(self._ids)
        return text[len(shown) :]
