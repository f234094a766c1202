"""Models with KV groups on the GPU engine against the plain float32 engine: Gemma-3, gpt-oss, and dense layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.gpu.config import GpuConfig
from engine.grouped_kv_manager import GroupedKVManager
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.test_engine import assert_same_logprobs, logprobs_of, open_gpu, reference

WINDOW, BLOCK_SIZE = 9, 4
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 32,
    "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL], "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
    },
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL], "attention_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2,
    "intermediate_size": 32, "swiglu_limit": 0.5, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [FULL, SLIDING]}
FAMILIES = {"gemma3": GEMMA3, "gpt-oss": GPT_OSS, "dense": DENSE}
NUM_BLOCKS = {"gemma3": 30, "gpt-oss": 20, "dense": 20}  # those of two groups have to preempt


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_the_plain_engine(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside decode rows, swapped sequences, and a second round over cached prefixes."""
    use_small_tiles(monkeypatch, 4)
    model = save_family(tmp_path, FAMILIES[family])
    expected = logprobs_of(reference(model))
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "preemption": "swap", "host_tier_gb": 0.01}
    made, _ = open_gpu(
        model,
        monkeypatch,
        GpuConfig(),
        num_gpu_blocks=NUM_BLOCKS[family],
        block_size=BLOCK_SIZE,
        max_model_len=40,
        **settings,
    )
    kv = made.scheduler.kv
    assert isinstance(kv, GroupedKVManager)
    for _ in range(2):
        for ours, theirs in zip(logprobs_of(made), expected, strict=True):
            assert_same_logprobs(ours, theirs)
    assert (made.scheduler.num_preemptions > 0) == (len(kv.groups.windows) == 2)
    assert kv.stats.hit_tokens > 0
    kv.pool.check_integrity()
    assert kv.pool.num_used == 0
    assert made.num_failed_steps == 0
