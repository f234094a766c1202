"""Loads the tokenizer in a GGUF file's metadata, with its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.gguf.parts import read_gguf
from common.gguf.tokenizer import backend_from_metadata
from common.text.tokenizer import Tokenizer

# Tokens that end an answer wherever they are, as in llama.cpp: most files name one, and chat templates use another.
_ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>",
))  # fmt: skip


def tokenizer_of_file(path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises UnsupportedModelError for an unknown kind."""
    metadata = read_gguf(path).metadata
    backend = backend_from_metadata(metadata)
    added = backend.get_added_tokens_decoder()
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    templates = {name: metadata[key] for name, key in keys.items() if isinstance(metadata.get(key), str)}
    return Tokenizer(
        backend,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata, {each.content: index for index, each in added.items()}),
        templates=templates,
    )


def _eos_token_ids(metadata: Mapping[str, Any], added: Mapping[str, int]) -> list[int]:
    """Return the tokens that end an answer, first the one that the metadata call so. added: ids by text."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = _ENDS & added.keys()
    if ends >= {"<|return|>", "<|call|>"}:  # gpt-oss ends each message of an answer with <|end|>
        ends -= {"<|end|>"}
    found = [token_id for token_id in named if isinstance(token_id, int)] + sorted(added[text] for text in ends)
    return list(dict.fromkeys(found))
