"""The shape of a rank's part of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from engine.config import EngineConfig
from engine.expert_balancing.loads import first_placements, placements_of
from engine.expert_balancing.settings import ExpertBalancingSettings
from engine.expert_parallel.settings import ExpertParallelSettings
from engine.models.config import ExchangeKind, ModelConfig
from kvstore.layout import Shard


def config_of_rank(config: ModelConfig, engine_config: EngineConfig, shard: Shard) -> ModelConfig:
    """What a rank computes of a model of `config`. Raises ConfigError where it cannot be divided so."""
    experts, balancing = engine_config.of(ExpertParallelSettings), engine_config.of(ExpertBalancingSettings)
    num_redundant = balancing.num_redundant_experts
    if balancing.expert_placement:
        path = Path(balancing.expert_placement)
        config = replace(config, expert_slots=placements_of(path, config, shard.size, num_redundant))
    elif balancing.expert_rebalance_interval:
        config = replace(config, expert_slots=first_placements(config, shard.size, num_redundant))
    expert_rank = shard.rank if experts.expert_parallel else None
    return config.shard(shard.size, expert_rank, cast(ExchangeKind, experts.expert_exchange))
