"""DeepSeek's models on the GPU engine against the plain float32 engine: latents, and all that chooses experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.gpu.config import GpuConfig
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.test_engine import generate, greedy, open_gpu, reference

V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "head_dim": None,
}  # fmt: skip
V3 = {
    **V2, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 24,
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("changes", [V2, V3], ids=["v2", "v3"])
def test_greedy_tokens_equal_those_of_the_plain_engine(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decode rows, contexts of several blocks and several splits."""
    use_small_tiles(monkeypatch, 4)
    model = save_family(tmp_path, changes)
    expected = generate(reference(model), greedy())
    made, runner = open_gpu(model, monkeypatch, GpuConfig(), max_num_batched_tokens=16)
    assert runner._pool.shape[2:4] == (1, 1)
    assert runner._pool.shape[5] == 48
    assert generate(made, greedy()) == expected
