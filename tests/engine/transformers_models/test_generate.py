"""Families that run by transformers' code: in batches, in chunks, from the prefix cache, they equal `generate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import EngineParts
from tests.engine import combinations
from tests.engine.driving import GREEDY, finish, random_prompt, serve
from tests.engine.tiny_models import reference_answers
from tests.engine.transformers_models.hf_families import FAMILIES, VOCAB_SIZE, generated

pytestmark = pytest.mark.slow

NUM_TOKENS = 9
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (1, 6, 19, 40)]


def open_engine(path: Path, **settings: Any) -> EngineParts:
    """Open an engine with small steps, so that prompt chunks and generated tokens share steps."""
    return combinations.open_engine(path, **{"model_impl": "transformers", "dtype": "float32", **settings})


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


# -- what the engine does around a model changes none of its tokens --------------------------------------------------


@pytest.mark.usefixtures("byte_tokens")
@pytest.mark.parametrize(("name", "num_blocks"), [("gpt_oss", 40), ("gpt_neox", 20)])
def test_drafts_swapped_blocks_and_a_prompt_budget_change_nothing(name: str, num_blocks: int, tmp_path: Path) -> None:
    """Together with vectors, log-probabilities of prompts, and a grammar."""
    tiny = FAMILIES[name]
    path = replace(tiny, changes={**tiny.changes, "vocab_size": 320}).save(tmp_path / name)
    expected = combinations.run(open_engine(path))
    drafts = {"num_speculative_tokens": 3, "adaptive_drafts": False, "ngram_min": 1, "itl_objective_ms": 5.0}
    parts = open_engine(path, num_gpu_blocks=num_blocks, **drafts, **combinations.SWAP)
    expected.check(parts, is_swapped=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "granitemoe", "minicpm3"])
def test_16_bits_stay_close_to_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    prompt = random_prompt(40, VOCAB_SIZE, 7)
    path, reference = FAMILIES[name].save(tmp_path / name), FAMILIES[name].build()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        rounded = reference.to(getattr(torch, dtype))(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    wanted = [[i, token] for i, token in enumerate(prompt[1:])]
    rows, tokens = torch.tensor(wanted).T
    parts = open_engine(path, dtype=dtype)
    parts.engine.add_request(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=1))
    found = [entry.logprob for output in finish(parts.engine) for entry in output.prompt_logprobs]
    error = (torch.tensor(found) - expected[rows, tokens]).abs().mean()
    assert error < 2 * (rounded - expected)[rows, tokens].abs().mean() + 1e-3
