"""Open the host tier of a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.host_tier.kv_manager import TieredKVManager
from engine.kv.manager import KVManager
from engine.kv.memory import host_buffer_over
from kvstore.layout import WHOLE, PoolGeometry
from kvstore.tier.agent_client import AgentHostTier
from kvstore.tier.content import content_name
from kvstore.tier.host_tier import HostTier, LocalHostTier


def open_tier(
    geometry: PoolGeometry, num_bytes: int, agent_socket: str, device: torch.device, by_swap: bool = False
) -> tuple[Callable[..., KVManager], Tensor | None]:
    """What makes the pool's KV manager, and the tier's slots uint8 (num_slots, block_bytes).

    The tier is the node agent's, or one of `num_bytes` here; None: these hold no block. Ranks keep their slots to
    themselves. by_swap: see TieredKVManager. Raises ConfigError, UnavailableError.
    """
    num_slots = num_bytes // geometry.block_bytes
    tier: HostTier
    if agent_socket and geometry.shard == WHOLE:
        # A GPU's driver keeps the pages that it has registered, whatever is mapped there later: no other agent's.
        reconnects = device.type == "cpu"
        tier = AgentHostTier(agent_socket, content_name(geometry), geometry.block_bytes, reconnects)
    elif num_slots:
        tier = LocalHostTier(num_slots, geometry.block_bytes)
    else:
        return KVManager, None
    buffer = host_buffer_over(tier.buffer, tier.num_slots, geometry.block_bytes)
    return partial(TieredKVManager, host_tier=tier, by_swap=by_swap), buffer
