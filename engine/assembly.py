"""Puts an engine together from its settings: device, model, KV pool, scheduler, runner.

The only place that knows all the parts. Where the pool's memory comes from is the caller's (`PoolMemory`): plain
memory for `engine.LLM`, a shareable segment for a worker.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from common.model_files import ModelFiles, resolve_model
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_manager import KVManager
from engine.kv_memory import allocate_pool, host_buffer_over, pool_geometry
from engine.scheduler import Scheduler
from kvstore.block_pool import BlockPool
from kvstore.host_tier import HostTier, LocalHostTier
from kvstore.types import PoolGeometry

if TYPE_CHECKING:
    from engine.models.config import ModelConfig

logger = logging.getLogger(__name__)


class PoolMemory(Protocol):
    """Gives the pool its bytes and, if there is one, the host tier behind it."""

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """A zeroed tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""
        ...

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None: ...


class PrivatePoolMemory:
    """Memory of this process alone."""

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        return allocate_pool(geometry, device)

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None:
        num_slots = host_tier_bytes // geometry.block_bytes
        return LocalHostTier(num_slots, geometry.block_bytes) if num_slots else None


@dataclass(frozen=True)
class EngineParts:
    """An engine and what others need to know about it."""

    engine: Engine
    files: ModelFiles
    model_config: ModelConfig
    geometry: PoolGeometry
    device: str
    quantization: str


def assemble(config: EngineConfig, memory: PoolMemory | None = None) -> EngineParts:
    """Load the model and build its engine. Raises ConfigError with what to do."""
    # Here, because they take seconds to import and the settings should be checked first.
    from engine.loader.load import load_model, resolve_device
    from engine.runner import ModelRunner

    began = time.monotonic()
    memory = memory or PrivatePoolMemory()
    files = resolve_model(config.model)
    device = resolve_device(config)
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(files, config, device)
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype)
    pool = memory.allocate(geometry, device)
    host_tier = memory.open_host_tier(geometry, int(config.host_tier_gb * 2**30))
    host_buffer = None
    if host_tier is not None:
        host_buffer = host_buffer_over(host_tier.buffer, host_tier.num_slots, geometry.block_bytes)
    runner = ModelRunner(loaded, pool, host_buffer, config)
    kv = KVManager(
        BlockPool(geometry.num_blocks, config.prefix_cache),
        config.block_size,
        loaded.fingerprint,
        host_tier,
        config.prefix_cache,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=loaded.config.context_length(config.max_model_len),
        preempt_by_swap=config.preemption == "swap",
    )
    engine = Engine(
        scheduler,
        runner,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=frozenset(loaded.config.eos_token_ids),
    )
    runner.warmup()
    logger.info(
        "%s on %s: %s, %d KV blocks of %d tokens (%.2f GB), ready in %.1f s",
        files.name,
        device,
        loaded.quant_mode,
        geometry.num_blocks,
        geometry.block_size,
        geometry.pool_bytes / 2**30,
        time.monotonic() - began,
    )
    return EngineParts(engine, files, loaded.config, geometry, str(device), loaded.quant_mode)
