"""The KV pool as a tensor: its geometry, its size, its memory, and the view over that memory.

Knows only bytes; `engine/kv/manager.py` decides which request owns a block.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from common.wings import call_wing, require_wing
from engine.config import EngineConfig
from engine.kv.manager import KVManager
from engine.models.config import ModelConfig
from kvstore.layout import WHOLE, KvLayout, PoolGeometry, Shard, full_attention, latent_attention
from kvstore.pool.block_pool import BlockPool
from kvstore.transports.shared_memory import create_memfd

logger = logging.getLogger(__name__)
TORCH_DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def pool_geometry(
    model_config: ModelConfig,
    engine_config: EngineConfig,
    fingerprint: str,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
) -> PoolGeometry:
    """Return the geometry of one rank's pool, for a model that computes in `dtype`.

    model_config: of the whole model. Raises ConfigError if the memory, which each rank has, holds no block.
    """
    layout = kv_layout(model_config, kv_dtype(engine_config, dtype))
    geometry = PoolGeometry(layout, 1, engine_config.block_size, fingerprint, shard)
    return replace(geometry, num_blocks=num_blocks_for(geometry, engine_config))


def kv_layout(model_config: ModelConfig, dtype: torch.dtype) -> KvLayout:
    """Return the KV layout of the model, stored as `dtype`."""
    config = model_config
    if config.windows:
        require_wing("engine.windows", "a model with sliding windows")
        from engine.windows.layout import windowed_attention

        return windowed_attention(config.windows, config.num_kv_heads, config.head_dim, DTYPE_NAMES[dtype])
    if config.num_kv_planes == 1:
        return latent_attention(config.num_layers, config.head_dim, DTYPE_NAMES[dtype])
    return full_attention(config.num_layers, config.num_kv_heads, config.head_dim, DTYPE_NAMES[dtype])


def kv_dtype(engine_config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the data type of stored K and V, for a model that computes in `dtype`."""
    stored: torch.dtype | None = call_wing("engine.eight_bit_kv.scales:stored_dtype", engine_config)
    return stored or dtype


def num_blocks_for(geometry: PoolGeometry, engine_config: EngineConfig) -> int:
    """Return the number of blocks in the settings, or how many fit into `kv_cache_gb` (10^9 bytes)."""
    if engine_config.num_gpu_blocks:
        return engine_config.num_gpu_blocks
    num_blocks = int(engine_config.kv_cache_gb * 1e9) // geometry.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-gb {engine_config.kv_cache_gb} holds no block of {geometry.block_bytes / 1e9:.3f} GB"
        )
    return num_blocks


def context_in_pool(max_model_len: int, geometry: PoolGeometry, engine_config: EngineConfig) -> int:
    """Return the longest sequence that fits into the pool, at most `max_model_len`.

    Raises ConfigError if the user asked for a longer one; the model's own maximum is cut with a warning.
    """
    kv = make_kv_manager(geometry, engine_config)
    longest = kv.longest
    if longest is None or max_model_len <= longest:
        return max_model_len
    needed = kv.most_blocks(max_model_len) * geometry.block_bytes
    numbers = (
        f"a sequence of {max_model_len} tokens needs {needed / 1e9:.2f} GB of KV blocks, and there are "
        f"{geometry.pool_bytes / 1e9:.2f} GB"
    )
    if engine_config.max_model_len:
        raise ConfigError(
            f"--max-model-len {max_model_len}: {numbers}. Choose at most {longest}, or more memory for KV blocks "
            "(--kv-cache-gb, --num-gpu-blocks; on a GPU --gpu-memory-fraction)"
        )
    logger.warning("%s: sequences may have %d tokens", numbers, longest)
    return longest


def make_kv_manager(geometry: PoolGeometry, config: EngineConfig) -> KVManager:
    """Make the block bookkeeping for a pool of that geometry."""
    pool = BlockPool(geometry.num_blocks, config.prefix_cache)
    if not geometry.layout.has_windows:
        return KVManager(pool, geometry.block_size, geometry.fingerprint)
    from engine.kv_groups.manager import GroupedKVManager
    from engine.kv_groups.of_layout import block_groups

    groups = block_groups(geometry.layout, geometry.block_size, config.max_num_batched_tokens)
    return GroupedKVManager(pool, groups, geometry.fingerprint)


def allocate_pool(geometry: PoolGeometry, device: torch.device) -> Tensor:
    """Allocate a zeroed pool, see PoolGeometry. On a CPU the OS zeroes each page when it is first written."""
    if device.type == "cpu":
        return pool_over(mmap.mmap(-1, geometry.pool_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), geometry)
    shape = (geometry.num_blocks, *geometry.block_shape)
    return torch.zeros(shape, dtype=TORCH_DTYPES[geometry.dtype], device=device)


def pool_over(buffer: Any, geometry: PoolGeometry) -> Tensor:
    """Return the pool as a view of a writable buffer (a memory map of `geometry.pool_bytes` or more)."""
    dtype = TORCH_DTYPES[geometry.dtype]
    count = geometry.pool_bytes // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count)
    return flat.view(geometry.num_blocks, *geometry.block_shape)


class PoolMemory:
    """Allocates the memory of KV pools: here private memory. A worker's memory is shared with its peers.

    agent_socket: Unix socket of the node agent that has host memory for blocks; empty: none.
    shares_device_pools: whether ranks on other GPUs allocate pools that this process can map, and pass them to it.
    """

    agent_socket = ""
    shares_device_pools = False

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> Tensor:
        """Allocate a zeroed tensor, see PoolGeometry."""
        return allocate_pool(geometry, device)

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        """Return a file descriptor of zeroed host memory for the pool of a rank in another process."""
        return create_memfd("mini-infer-kv", geometry.pool_bytes)

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        """Take over the pool that a rank in another process has allocated on `device`, and its file descriptor."""
        raise AssertionError("ranks keep their pools to themselves")
