"""Vectors of prompts on the GPU engine equal those of the plain one, for steps of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import GpuConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from tests.gpu.kv.test_kv_groups import GEMMA3
from tests.gpu.mla.test_latents import V2
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.pipeline_parallel.test_pipeline_parallel import open_stages
from tests.gpu.test_engine import ON_GPU, PROMPTS, open_gpu, reference

POOLED = SamplingParams(max_tokens=1, temperature=0.0)
ALL = [*PROMPTS, [9], PROMPTS[2][:17]]  # a prompt of one token; one with one uncached token


def vectors(made: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Tensor]:
    found: dict[Request, Any] = {made.add_request(prompt, params): None for prompt in prompts}
    while made.has_work():
        for output in made.step().outputs:
            assert output.error is None
            if output.request in found:
                [found[output.request]] = output.logprobs
    return [torch.tensor(entry.top_logprobs) for entry in found.values()]


@pytest.mark.parametrize(("settings", "pooling"), [({}, "last"), ({"max_num_batched_tokens": 16}, "mean")], ids=str)
def test_equal_those_of_the_plain_engine(
    settings: dict[str, Any], pooling: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(POOLED, pooling=pooling)
    expected = vectors(reference(model), ALL, params)
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), block_size=8, **settings)
    runner.prompt_graphs = runner.open_prompt_graphs(captures=ON_GPU)
    other = made.add_request(PROMPTS[1], replace(POOLED, max_tokens=24, ignore_eos=True))
    for _ in range(2):  # the second time with a cache
        for prompt, wanted in zip(ALL, expected, strict=True):
            torch.testing.assert_close(vectors_of_one(made, prompt, params), wanted, rtol=1e-3, atol=1e-3)
    for ours, wanted in zip(vectors(made, ALL, params), expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
    assert len(other.output_token_ids) == 24
    assert made.num_failed_steps == 0


def vectors_of_one(made: Engine, prompt: list[int], params: SamplingParams) -> Tensor:
    """Return the vectors of a prompt, without waiting for other requests."""
    request = made.add_request(prompt, params)
    while True:
        for output in made.step().outputs:
            assert output.error is None
            if output.request is request:
                return torch.tensor(output.logprobs[0].top_logprobs)


@pytest.mark.parametrize("changes", [V2, GEMMA3], ids=["latents", "windows"])
def test_other_blocks(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch, 4)
    path = save_family(tmp_path, changes)
    plain = reference(path)
    made, _ = open_gpu(path, monkeypatch, GpuConfig(), num_gpu_blocks=96, block_size=8, max_num_batched_tokens=16)
    for pooling in ("last", "mean"):
        check(made, plain, replace(POOLED, pooling=pooling))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stages(num_ranks: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages run eagerly, so that rows arrive in the expected order."""
    plain = reference(model)
    gpu = GpuConfig(use_cuda_graph=num_ranks == 1)  # ranks here are threads, but one thread captures
    made = open_stages(model, 2, monkeypatch, gpu, num_ranks, block_size=8)
    for pooling in ("last", "mean"):
        check(made, plain, replace(POOLED, pooling=pooling))


def check(made: Engine, plain: Engine, params: SamplingParams) -> None:
    """Compare all vectors twice, the second time with cached prefixes."""
    expected = vectors(plain, ALL, params)
    for _ in range(2):
        for ours, wanted in zip(vectors(made, ALL, params), expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
    assert made.num_failed_steps == 0
