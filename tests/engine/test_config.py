from __future__ import annotations

import pytest

from common.errors import ConfigError
from engine.config import EngineConfig


@pytest.mark.parametrize(("device", "block_size"), [("cpu", 16), ("cuda", 64)])
def test_automatic_block_size_follows_the_device(device: str, block_size: int) -> None:
    assert EngineConfig().resolved(device).block_size == block_size
    assert EngineConfig(block_size=32).resolved(device).block_size == 32


def test_resolving_twice_changes_nothing() -> None:
    once = EngineConfig().resolved("cuda")
    assert once.resolved("cuda") == once


def test_block_sizes_that_a_gpu_cannot_take() -> None:
    assert EngineConfig(block_size=24).resolved("cpu").block_size == 24
    with pytest.raises(ConfigError, match="--block-size 24: on a GPU it must be a power of two"):
        EngineConfig(block_size=24).resolved("cuda")
    with pytest.raises(ConfigError, match="--block-size -1"):
        EngineConfig(block_size=-1)


def test_without_services_a_step_on_a_gpu_is_longer() -> None:
    assert EngineConfig().resolved("cuda").max_num_batched_tokens == 8192
    assert EngineConfig().resolved("cuda", is_offline=True).max_num_batched_tokens == 16384
    assert EngineConfig(max_num_batched_tokens=512).resolved("cuda", is_offline=True).max_num_batched_tokens == 512
    assert EngineConfig().resolved("cpu", is_offline=True) == EngineConfig().resolved("cpu")
