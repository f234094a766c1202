"""How much of a GPU's memory is left for KV blocks, after weights, activations of the largest step, and graphs."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.gpu.attention.choose import choose, facts_of, workspace_bytes
from engine.gpu.config import GpuConfig
from engine.loader import LoadedModel

GRAPH_BYTES = 1 << 30  # decode graphs, kernels and libraries; measured 0.4 to 0.8 GB for 7B


def kv_cache_gb(loaded: LoadedModel, config: EngineConfig, gpu: GpuConfig) -> float:
    """GB (10^9 bytes) for KV blocks. Raises ConfigError with the numbers when nothing is left."""
    free, total = torch.cuda.mem_get_info(loaded.device)
    used = total - free
    facts = facts_of(loaded.dtype, loaded.dtype, loaded.config.head_dim, loaded.device)
    working = activation_bytes(loaded, config) + workspace_bytes(choose(gpu.attention_backend, facts))
    budget = int(total * gpu.gpu_memory_fraction) - used - working - GRAPH_BYTES
    if budget <= 0:
        raise ConfigError(
            f"no GPU memory is left for KV blocks: {total / 1e9:.1f} GB in all, {used / 1e9:.1f} GB used with the "
            f"weights, --gpu-memory-fraction {gpu.gpu_memory_fraction}: raise it, lower --max-num-batched-tokens, or "
            "choose a smaller model"
        )
    return budget / 1e9


def activation_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Upper bound of what one step allocates: tensors that live at the same time in a layer, and the logits."""
    model = loaded.config
    per_token = 4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate_size
    logits = config.max_num_seqs * model.vocab_size * (loaded.dtype.itemsize + 4)
    return config.max_num_batched_tokens * per_token * loaded.dtype.itemsize + 2 * logits
