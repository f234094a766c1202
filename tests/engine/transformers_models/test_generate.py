"""Families that run by transformers' code: in batches, in chunks, from the prefix cache, they equal `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.assembly import EngineParts, assemble
from tests.engine.driving import engine_config, random_prompt, serve
from tests.engine.tiny_models import reference_answers
from tests.engine.transformers_models.hf_families import FAMILIES, VOCAB_SIZE, generated

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (1, 6, 19, 40)]


def open_engine(path: Path, **settings: Any) -> EngineParts:
    """Steps of few tokens: prompts come in chunks beside generated tokens."""
    base = {
        "device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks": 300, "block_size": 4,
        "max_num_batched_tokens": 16, "max_num_seqs": 8, "model_impl": "transformers",
    }  # fmt: skip
    return assemble(engine_config(str(path), **{**base, **settings}))


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_generate(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    reference = family.build()
    path = family.save(tmp_path / name, reference)
    expected = reference_answers(reference, PROMPTS, NUM_TOKENS)
    assert generated(reference, PROMPTS[-1], NUM_TOKENS) == expected[-1]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "a model that repeats itself shows nothing"
    parts = open_engine(path)
    assert [request.output_token_ids for request in serve(parts.engine, PROMPTS, NUM_TOKENS)] == expected
    again = serve(parts.engine, [PROMPTS[-1]], NUM_TOKENS)
    assert again[0].num_cached_tokens > 0
    assert again[0].output_token_ids == expected[-1]
