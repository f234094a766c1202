"""A whole engine whose prompts attend through other backends: same tokens as the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import engine.gpu.runner
from engine.gpu.attention.backend import PrefillAttention
from engine.gpu.attention.fa3 import FlashAttention3
from engine.gpu.config import GpuConfig
from tests.gpu.models import save_tiny_model
from tests.gpu.test_attention import flash_forward, make
from tests.gpu.test_engine import PROMPTS, generate, greedy, open_gpu, reference


@pytest.mark.parametrize("name", ["fa3", "cudnn"])
def test_same_tokens_in_chunks_between_decodes_and_over_a_cached_prefix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_other(
        wanted: str, pool: Tensor, num_heads: int, dtype: torch.dtype, max_tokens: int
    ) -> PrefillAttention:
        assert wanted == "auto"
        if name == "fa3":  # in torch on a GPU too: these are float32, which the package does not take
            return FlashAttention3(flash_forward, pool, num_heads, dtype)
        if torch.cuda.is_available():
            pytest.skip("cuDNN does not take float32")
        return make(name, pool, num_heads, max_tokens)

    model = save_tiny_model(tmp_path)
    expected = generate(reference(model), greedy(4))
    monkeypatch.setattr(engine.gpu.runner, "open_attention", open_other)
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), block_size=8, max_num_batched_tokens=30)
    assert generate(made, greedy(4)) == expected
    again = [prompt for prompt in PROMPTS if len(prompt) > 16]
    assert generate(made, greedy(4), again) == [expected[PROMPTS.index(prompt)] for prompt in again]
    assert made.scheduler.kv.stats.hit_tokens > 0
