"""The GPU engine with an 8-bit KV cache against the plain engine with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from tests.gpu.test_engine import ON_GPU, PLAIN, forced_logits, generate, greedy, open_gpu


def test_logits_are_near_those_of_the_plain_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round to 8 bits; sums that differ in their last bits may round to neighbouring values, 6% apart."""
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    plain = assemble(
        EngineConfig(str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64, **fp8)
    )
    tokens = generate(plain.engine, greedy())
    want = forced_logits(plain.engine, plain.runner, tokens)
    made, runner = open_gpu(model, monkeypatch, PLAIN, kv_cache_dtype="fp8", block_size=64)
    got = forced_logits(made, runner, tokens)
    bound = 2e-2 if ON_GPU else 1e-1  # the interpreter halves numbers that it should round up to a power of two
    for one, other in zip(want, got, strict=True):
        assert float((one - other).norm() / one.norm()) < bound


def test_steps_and_cached_prefixes_do_not_matter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = open_gpu(model, monkeypatch, PLAIN, kv_cache_dtype="fp8", block_size=8)
    want = generate(made, greedy(3))
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), kv_cache_dtype="fp8", block_size=8)
    assert generate(made, greedy(3)) == want
    assert generate(made, greedy(3)) == want
    assert made.kv.stats.hit_tokens > 0
