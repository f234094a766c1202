"""Vectors beside other features of an engine, and beside requests that use them: those of an engine without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.grammar import grammar
from engine.assembly import EngineParts
from engine.request import Request, SamplingParams, TokenLogprobs
from tests.engine.driving import num_drafts, step
from tests.engine.pipeline_parallel import test_pipeline
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.tensor_parallel.test_ranks import open_ranks
from tests.engine.test_combinations import (
    FLOAT32,
    MODELS,
    PLAIN,
    PROMPTS,
    SMALL_STEPS,
    SWAP,
    _byte_tokens,
    open_engine,
    place_experts,
)
from tests.engine.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow
__all__ = ["_byte_tokens"]  # a fixture that all tests here use
POOLED = SamplingParams(max_tokens=1, temperature=0.0)
LONG = [(5 * i) % 200 for i in range(40)]


def run(parts: EngineParts) -> tuple[list[Tensor], list[list[int]]]:
    """Vectors of a long prompt, which generating ones with more urgent prompts interrupt, and what all sample."""
    made = parts.engine
    wanted = [made.add_request(LONG, replace(POOLED, pooling=pooling), priority=1) for pooling in ("last", "mean")]
    made.step()
    params = [PLAIN, PLAIN, PLAIN, replace(PLAIN, grammar=grammar.regex("[a-f]{40}"))]
    others = [made.add_request(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    found: dict[Request, list[TokenLogprobs]] = {}
    while made.has_work():
        for output in step(made).outputs:
            assert output.error is None
            found.setdefault(output.request, []).extend(output.logprobs)
    assert made.num_failed_steps == 0
    made.kv.pool.check_integrity()
    vectors = [torch.tensor(entry.top_logprobs) for request in wanted for entry in found[request]]
    return vectors, [request.output_token_ids for request in (*others, wanted[0])]


def check(parts: EngineParts, vectors: Sequence[Tensor], tokens: list[list[int]], near: float = 1e-3) -> None:
    found, outputs = run(parts)
    assert outputs == tokens
    for ours, theirs in zip(found, vectors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_beside_drafts_over_8_bit_blocks_that_are_swapped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, settings, num_blocks = MODELS[name]
    path, settings = save(tmp_path / "m"), {**settings, "kv_cache_dtype": "fp8"}
    vectors, tokens = run(open_engine(path, **settings))
    answers = [prompt + each for prompt, each in zip([*PROMPTS, LONG], tokens, strict=True)]
    draft_with(monkeypatch, MakeOracle(knows(answers), 0.7, VOCAB_SIZE))
    made = open_engine(
        path, num_speculative_tokens=3, adaptive_drafts=False, **settings, **SWAP, num_gpu_blocks=num_blocks
    )
    check(made, vectors, tokens, near=5e-2)
    assert num_drafts(made.engine)[1] > 0
    assert made.engine.load().num_preemptions > 0


def test_vectors_of_ranks_that_dispatch_to_placed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, settings, _ = MODELS["windows and experts"]
    path = save(tmp_path / "m")
    vectors, tokens = run(open_engine(path, **settings))
    place_experts(monkeypatch, tmp_path / "loads.json", [[90, 1, 40, 5, 5, 9]] * 4)
    check(open_ranks(path, 2, monkeypatch, itl_objective_ms=1000.0, **SMALL_STEPS), vectors, tokens)


def test_vectors_while_experts_are_counted(tmp_path: Path) -> None:
    save, settings, _ = MODELS["windows and experts"]
    path = save(tmp_path / "m")
    vectors, tokens = run(open_engine(path, **settings))
    check(open_engine(path, **settings, expert_load_file=str(tmp_path / "loads.json")), vectors, tokens)


def test_vectors_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, tokens = run(open_engine(Path("dry-run"), **FLOAT32))
    settings: dict[str, Any] = {**SMALL_STEPS, "num_gpu_blocks": 64}
    check(test_pipeline.open_stages(Path("dry-run"), 2, monkeypatch, **settings), vectors, tokens)
