"""What the engine does around a model of transformers' code changes none of its tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.combinations import SWAP, open_engine, run
from tests.engine.driving import GREEDY, finish, random_prompt
from tests.engine.transformers_models.hf_families import FAMILIES, VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("byte_tokens")]
ASKED: dict[str, Any] = {"model_impl": "transformers", "dtype": "float32"}


@pytest.mark.parametrize(("name", "num_blocks"), [("gpt_oss", 40), ("gpt_neox", 20)])
def test_drafts_swapped_blocks_and_a_prompt_budget_change_nothing(name: str, num_blocks: int, tmp_path: Path) -> None:
    """Beside vectors, log-probabilities of prompts, and a grammar."""
    tiny = FAMILIES[name]
    path = replace(tiny, changes={**tiny.changes, "vocab_size": 320}).save(tmp_path / name)
    expected = run(open_engine(path, **ASKED))
    drafts = {"num_speculative_tokens": 3, "adaptive_drafts": False, "ngram_min": 1, "itl_objective_ms": 5.0}
    parts = open_engine(path, num_gpu_blocks=num_blocks, **drafts, **SWAP, **ASKED)
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
    parts = open_engine(path, model_impl="transformers", dtype=dtype)
    parts.engine.add_request(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=1))
    found = [entry.logprob for output in finish(parts.engine) for entry in output.prompt_logprobs]
    error = (torch.tensor(found) - expected[rows, tokens]).abs().mean()
    assert error < 2 * (rounded - expected)[rows, tokens].abs().mean() + 1e-3
