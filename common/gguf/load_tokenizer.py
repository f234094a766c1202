"""Loads the tokenizer in a GGUF file's metadata, with its chat template."""

from __future__ import annotations

from pathlib import Path

from common.gguf.parts import read_gguf
from common.gguf.tokenizer import backend_from_metadata
from common.text.tokenizer import Tokenizer


def tokenizer_of_file(path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises UnsupportedModelError for an unknown kind."""
    metadata = read_gguf(path).metadata
    backend = backend_from_metadata(metadata)
    eos_ids = [
        metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        if isinstance(metadata.get(key), int)
    ]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_ids,
        templates={"default": template} if isinstance(template, str) else {},
    )
