"""Roofline step times against measured ones of GPUs (docs/benchmarks.md, in tok/s, prompts in ms); what fits."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from cli.simulation.model_costs import GPUS, H200, STEP_SECONDS, ModelSize, model_size, num_kv_blocks, step_cost
from tests.harness.cluster import ROOT

CONTEXT = 1024 + 64  # tokens of KV that a row reads, halfway through its answer


@cache
def size(name: str, quant_mode: str = "none") -> ModelSize:
    return model_size(f"{ROOT}/benchmarks/configs/{name}", quant_mode)[0]


@pytest.mark.parametrize(
    ("name", "quant_mode", "ranks", "measured"),
    [
        ("qwen2.5-7b", "none", 1, {1: 258, 8: 1961, 64: 12190, 256: 23867}),
        ("qwen2.5-7b", "none", 2, {1: 410, 8: 2891, 64: 18304, 256: 39825}),
        ("qwen2.5-7b", "fp8", 1, {1: 440, 8: 3236, 64: 16139}),
        ("qwen2.5-7b", "fp8", 2, {1: 598, 8: 4304, 64: 22742, 256: 43779}),
        ("llama3.3-70b", "none", 2, {1: 53.7, 8: 416, 64: 2660}),
        ("llama3.3-70b", "fp8", 2, {1: 89.5, 8: 680, 64: 3939}),
        ("qwen3-8b", "none", 1, {1: 224, 8: 1694, 64: 8771, 256: 14990}),
        ("qwen3-30b-a3b", "none", 1, {64: 3783, 256: 10850}),
        ("qwen3-30b-a3b", "none", 2, {64: 6229, 256: 18074}),
    ],
)
def test_decode_steps_take_what_was_measured(
    name: str, quant_mode: str, ranks: int, measured: dict[int, float]
) -> None:
    cost = step_cost(size(name, quant_mode), H200, ranks)
    found = {rows: rows / (cost.seconds(rows, context=rows * CONTEXT) - STEP_SECONDS) for rows in measured}
    assert found == pytest.approx(measured, rel=0.13)


@pytest.mark.parametrize(
    ("ranks", "measured"),
    [
        (1, {64: 5.2, 256: 7.3, 512: 12.5, 1024: 23.2, 2048: 46, 4096: 93, 8192: 188}),
        (2, {2048: 28, 8192: 105}),
    ],
)
def test_prompts_take_what_was_measured(ranks: int, measured: dict[int, float]) -> None:
    cost = step_cost(size("qwen2.5-7b"), H200, ranks)
    found = {tokens: 1e3 * (cost.seconds(0, tokens, pairs=tokens**2 / 2) - STEP_SECONDS) for tokens in measured}
    assert found == pytest.approx(measured, rel=0.11)


def test_ranks_share_weights_and_kv_and_exchange_sums() -> None:
    costs = [step_cost(size("llama3.3-70b"), H200, ranks) for ranks in (1, 2, 4, 8)]
    for alone, divided in pairwise(costs):
        assert divided.context == alone.context / 2
        assert alone.base / 2 < divided.base < alone.base
        assert alone.prompt_token / 2 < divided.prompt_token < alone.prompt_token
    heads = size("qwen2.5-7b").num_kv_heads
    assert size("qwen2.5-7b").kv_bytes(2 * heads) == size("qwen2.5-7b").kv_bytes(heads)  # two ranks have the same one


@pytest.mark.parametrize(
    ("name", "quant_mode", "gpu", "fits"),
    [
        ("qwen2.5-7b", "none", "h200", (True, True, True)),
        ("llama3.3-70b", "none", "h200", (False, True, True)),
        ("llama3.3-70b", "fp8", "h200", (True, True, True)),
        ("llama3.3-70b", "none", "h100", (False, False, True)),
    ],
)
def test_memory_says_how_many_ranks_a_model_needs(
    name: str, quant_mode: str, gpu: str, fits: tuple[bool, ...]
) -> None:
    blocks = [num_kv_blocks(size(name, quant_mode), GPUS[gpu], ranks, 64) for ranks in (1, 2, 4)]
    assert tuple(map(bool, blocks)) == fits
    assert blocks == sorted(blocks)
