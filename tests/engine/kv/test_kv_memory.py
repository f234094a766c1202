"""Pool size, and views over foreign memory."""

from __future__ import annotations

import mmap

import pytest
import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.kv.memory import context_in_pool, pool_geometry, pool_over
from engine.loader.random_weights import DRY_RUN_CONFIG
from kvstore.layout import PoolGeometry


def geometry_of(**settings: object) -> PoolGeometry:
    config = EngineConfig(**settings).resolved("cpu")  # type: ignore[arg-type]
    return pool_geometry(DRY_RUN_CONFIG, config, "f", torch.float32)


def test_the_number_of_blocks_is_given_or_follows_from_the_memory() -> None:
    assert geometry_of(num_gpu_blocks=7).num_blocks == 7
    geometry = geometry_of(kv_cache_gb=0.001)
    assert geometry.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert geometry.pool_bytes <= 1_000_000 < geometry.pool_bytes + geometry.block_bytes
    with pytest.raises(ConfigError, match="--kv-cache-gb"):
        geometry_of(kv_cache_gb=1e-6)


def test_a_context_that_blocks_do_not_hold_is_cut_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    geometry = geometry_of(num_gpu_blocks=7)
    assert context_in_pool(112, geometry, EngineConfig(max_model_len=112)) == 112
    assert not caplog.text
    assert context_in_pool(4096, geometry, EngineConfig()) == 112
    assert "4096 tokens needs 0.00 GB of KV blocks" in caplog.text
    with pytest.raises(ConfigError, match=r"--max-model-len 113: .* Choose at most 112, or more memory"):
        context_in_pool(113, geometry, EngineConfig(max_model_len=113))


def test_a_pool_over_a_memory_map_shares_its_bytes() -> None:
    geometry = geometry_of(num_gpu_blocks=5)
    memory = mmap.mmap(-1, geometry.pool_bytes + 4096)
    pool = pool_over(memory, geometry)
    assert tuple(pool.shape) == (5, *geometry.block_shape)
    pool[3].fill_(1.0)
    assert memory[3 * geometry.block_bytes : 3 * geometry.block_bytes + 4] == b"\0\0\x80\x3f"
