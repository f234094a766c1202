"""Open the host tier of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.host_tier.buffer import host_buffer_over
from engine.host_tier.kv_manager import TieredKVManager
from engine.host_tier.settings import HostTierSettings
from engine.kv.manager import KVManager
from engine.kv_groups.of_layout import block_groups
from kvstore.layout import WHOLE, PoolGeometry
from kvstore.pool.block_pool import BlockPool
from kvstore.tier.agent_client import AgentHostTier
from kvstore.tier.content import content_name
from kvstore.tier.host_tier import HostTier, LocalHostTier


def open_tier(
    geometry: PoolGeometry, config: EngineConfig, agent_socket: str, device: torch.device
) -> tuple[KVManager, Tensor] | None:
    """The pool's KV manager, and the tier's slots uint8 (num_slots, block_bytes).

    The tier is the node agent's, or one of `host_tier_gb` here; None: these hold no block. Ranks keep their slots to
    themselves. Raises ConfigError, UnavailableError.
    """
    settings = config.of(HostTierSettings)
    num_slots = int(settings.host_tier_gb * 2**30) // geometry.block_bytes
    tier: HostTier
    if agent_socket and geometry.shard == WHOLE:
        # A GPU's driver keeps the pages that it has registered, whatever is mapped there later: no other agent's.
        reconnects = device.type == "cpu"
        tier = AgentHostTier(agent_socket, content_name(geometry), geometry.block_bytes, reconnects)
    elif num_slots:
        tier = LocalHostTier(num_slots, geometry.block_bytes)
    else:
        return None
    kv = TieredKVManager(
        BlockPool(geometry.num_blocks, config.prefix_cache),
        block_groups(geometry.layout, geometry.block_size, config.max_num_batched_tokens),
        geometry.fingerprint,
        tier,
        by_swap=settings.preemption == "swap",
    )
    return kv, host_buffer_over(tier.buffer, tier.num_slots, geometry.block_bytes)
