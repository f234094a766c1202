"""Vectors of models with bidirectional attention on the GPU engine equal those of the plain engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import GpuConfig
from tests.gpu.kv.test_kv_groups import GEMMA3
from tests.gpu.models import save_family
from tests.gpu.pooling.test_gpu_vectors import ALL, POOLED, vectors
from tests.gpu.test_engine import ON_GPU, open_gpu, reference

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3Model"], "is_causal": False},
    "embeddinggemma": {**GEMMA3, "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_those_of_the_plain_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs exist, but none is used."""
    path = save_family(tmp_path, FAMILIES[name])
    plain = reference(path)
    assert plain.max_model_len > max(map(len, ALL))
    made, runner = open_gpu(path, monkeypatch, GpuConfig(), block_size=8, num_gpu_blocks=200, max_model_len=65)
    runner.prompt_graphs = runner.open_prompt_graphs(captures=ON_GPU)
    assert runner.attention_backend == "bidirectional"
    for pooling in ("last", "mean"):
        params = replace(POOLED, pooling=pooling)
        expected = vectors(plain, ALL, params)
        for ours, wanted in zip(vectors(made, ALL, params), expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
    for prompt, wanted in list(zip(ALL, expected, strict=True))[-2:]:  # alone; the first one has one token
        torch.testing.assert_close(vectors(made, [prompt], params)[0], wanted, rtol=1e-3, atol=1e-3)
    assert made.num_failed_steps == 0
