"""A whole engine whose prompts attend through other backends: same tokens as the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.gpu.attention.grouped
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.gpu.attention.backend import PrefillAttention
from engine.prefill_backends import fa3
from engine.prefill_backends.fa3 import FlashAttention3, Operator
from tests.gpu.models import save_tiny_model
from tests.gpu.test_attention import flash_forward, make
from tests.gpu.test_engine import PROMPTS, forced_logits, generate, greedy, open_gpu, reference


@pytest.mark.parametrize("name", ["fa3", "fa3 pages", "cudnn"])
def test_same_tokens_in_chunks_between_decodes_and_over_a_cached_prefix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_other(
        wanted: str, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int, needs: str
    ) -> PrefillAttention:
        assert (wanted, needs) == ("auto", "")
        if name != "cudnn":  # in torch on a GPU too: these are float32, which the package does not take
            operator = Operator(flash_forward, follows_tables=name == "fa3 pages")
            return FlashAttention3(operator, pool, num_heads, dtype)
        if torch.cuda.is_available():
            pytest.skip("cuDNN does not take float32")
        return make(name, pool, num_heads, max_tokens)

    model = save_tiny_model(tmp_path)
    expected = generate(reference(model), greedy(4))
    monkeypatch.setattr(engine.gpu.attention.grouped, "open_attention", open_other)
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), block_size=8, max_num_batched_tokens=30)
    assert runner.attention_backend == name.split()[0]
    assert generate(made, greedy(4)) == expected
    again = [prompt for prompt in PROMPTS if len(prompt) > 16]
    assert generate(made, greedy(4), again) == [expected[PROMPTS.index(prompt)] for prompt in again]
    assert made.kv.stats.hit_tokens > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
@pytest.mark.parametrize("name", ["triton", "fa3"])
def test_logits_of_chunks_and_cached_prefixes_are_near_those_of_float32(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "fa3" and not fa3.installed_package():
        pytest.skip("FlashAttention-3 is not installed")
    model = save_tiny_model(tmp_path, head_dim=64)
    expected = generate(reference(model), greedy())
    plain = assemble(EngineConfig(str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64))
    want = forced_logits(plain.engine, plain.runner, expected)
    gpu = GpuConfig(attention_backend=name)
    made, runner = open_gpu(model, monkeypatch, gpu, dtype="bfloat16", block_size=16, max_num_batched_tokens=30)
    for _ in range(2):  # the second time over the blocks of the first
        for one, other in zip(want, forced_logits(made, runner, expected), strict=True):
            assert float((one - other).norm() / one.norm()) < 2e-2
    assert made.kv.stats.hit_tokens > 0
