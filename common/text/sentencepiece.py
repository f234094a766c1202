"""Bytes of the tokens of SentencePiece vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable

from tokenizers import Tokenizer as Backend

from common.errors import UnsupportedModelError


def piece_bytes_of(backend: Backend) -> Callable[[int], bytes | None]:
    """Return the function from token id to bytes. Raises UnsupportedModelError for another kind of decoder."""
    if "▁" not in repr(backend.decoder):
        raise UnsupportedModelError(
            f"the tokenizer's decoder ({type(backend.decoder).__name__}) is neither byte-level nor SentencePiece"
        )
    added = frozenset(backend.get_added_tokens_decoder())

    def piece_bytes(token_id: int) -> bytes | None:
        text = backend.id_to_token(token_id)
        if text is None:
            return None
        if token_id not in added and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return (text if token_id in added else text.replace("▁", " ")).encode()

    return piece_bytes
