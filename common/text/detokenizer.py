"""Incremental detokenization, one token at a time, which never shows half a character.

A byte-level vocabulary maps each token to bytes, so the text of a sequence is the UTF-8 decoding of the
concatenated bytes. As only the bytes of an incomplete last character are kept, a token costs O(1). Knows nothing
of stop strings or requests.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable


class TokenTable:
    """Bytes of every token, and its text if they are whole characters; filled on first use.

    piece_bytes: maps the id of a token of the vocabulary to its bytes, or None if it has none.
    """

    def __init__(
        self,
        vocab_size: int,
        piece_bytes: Callable[[int], bytes | None],
        special_ids: frozenset[int],
        strips_prefix_space: bool,
    ) -> None:
        self.special_ids = special_ids
        self.strips_prefix_space = strips_prefix_space
        self._piece_bytes = piece_bytes
        self._bytes: list[bytes | None] = [None] * vocab_size
        # Visible text of a token that follows whole characters; None: not known yet, or not whole characters.
        self.texts: list[str | None] = [None] * vocab_size

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of any token, special ones included; empty for ids outside the vocabulary."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._piece_bytes(token_id) or b""
            text, consumed = utf_8_decode(known, "replace", False)
            if token_id in self.special_ids:
                self.texts[token_id] = ""
            elif consumed == len(known) and "�" not in text:
                self.texts[token_id] = text
        return known


class Detokenizer:
    """The text of one growing sequence. The results of `push` and `finish` add up to the decoding of all tokens.

    continues: the sequence continues a prompt, so the space that SentencePiece puts before the first word is part of
    the text.
    """

    __slots__ = ("_at_start", "_pending", "_skip_special", "_table", "_texts")

    def __init__(self, table: TokenTable, skip_special: bool = True, continues: bool = False) -> None:
        self._table = table
        self._texts = table.texts
        self._skip_special = skip_special
        self._pending = b""  # bytes of an incomplete character
        self._at_start = table.strips_prefix_space and not continues

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens; return the text that is final."""
        pieces: list[str] = []
        texts = self._texts
        limit = len(texts)
        for token_id in token_ids:
            text = texts[token_id] if token_id < limit else ""
            if text is None or self._pending or not self._skip_special:
                text = self._push_bytes(token_id)
            pieces.append(text)
        text = "".join(pieces)
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """Flush the end of the text: U+FFFD for an incomplete character."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def _push_bytes(self, token_id: int) -> str:
        data = self._table.bytes_of(token_id)
        if self._skip_special and token_id in self._table.special_ids:
            return ""
        data = self._pending + data
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text
