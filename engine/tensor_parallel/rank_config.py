"""The config of a rank's part of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.expert_balancing.loads import first_placements, placements_of
from engine.expert_balancing.settings import ExpertBalancingSettings
from engine.expert_parallel.settings import ExpertParallelSettings
from engine.models.config import ModelConfig
from engine.moe.config import ExchangeKind
from engine.pipeline_parallel.staged import divide_layers
from kvstore.layout import Shard


def config_of_rank(config: ModelConfig, engine_config: EngineConfig, shard: Shard) -> ModelConfig:
    """Return the config of a rank's part of the model. Raises ConfigError if ranks cannot divide it so."""
    experts, balancing = engine_config.of(ExpertParallelSettings), engine_config.of(ExpertBalancingSettings)
    num_redundant = balancing.num_redundant_experts
    if balancing.expert_placement:
        path = Path(balancing.expert_placement)
        config = replace(config, expert_slots=placements_of(path, config, shard.size, num_redundant))
    elif balancing.expert_rebalance_interval:
        config = replace(config, expert_slots=first_placements(config, shard.size, num_redundant))
    expert_rank = shard.rank if experts.expert_parallel else None
    return divided(config, shard.size, expert_rank, cast(ExchangeKind, experts.expert_exchange))


def check_division(config: ModelConfig, engine_config: EngineConfig) -> None:
    """Raise ConfigError for a model that cannot be divided among the ranks of the settings."""
    if engine_config.tp > 1:
        config_of_rank(config, engine_config, Shard(rank=0, size=engine_config.tp))
    if engine_config.pp > 1:
        divide_layers(config, engine_config.pp)


def divided(
    config: ModelConfig, size: int, expert_rank: int | None = None, expert_exchange: ExchangeKind = "sum"
) -> ModelConfig:
    """Return the config of each of `size` ranks, see `engine.layers.weights.Partition`. Raises ConfigError.

    expert_rank: this rank, if it has whole experts. expert_exchange: how other ranks use them.
    All ranks are alike: with fewer KV heads than ranks, several ranks hold the same head, and a vocabulary that
    cannot be divided is padded.
    """
    if not can_be_divided(config, size):
        possible = ", ".join(str(count) for count in range(1, config.num_heads + 1) if can_be_divided(config, count))
        raise ConfigError(
            f"{size} ranks cannot divide {config.num_heads} query heads, {config.num_kv_heads} KV heads and "
            f"{config.intermediate_size} columns of MLPs: choose --tp of {possible}"
        )
    moe = config.moe
    if expert_rank is not None and (moe is None or (moe.num_experts % size and not config.expert_slots)):
        experts = "no experts" if moe is None else f"{moe.num_experts} experts a layer"
        raise ConfigError(f"--expert-parallel: {size} ranks cannot divide {experts}: leave it out")
    return replace(
        config,
        vocab_size=-(-config.vocab_size // size),
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=config.intermediate_size // size,
        moe=moe and moe.shard(size, expert_rank, expert_exchange),
    )


def can_be_divided(config: ModelConfig, size: int) -> bool:
    """Whether `size` ranks can have equal parts of the model."""
    columns = [config.intermediate_size, *([config.moe.intermediate_size] if config.moe else [])]
    most, least = max(config.num_kv_heads, size), min(config.num_kv_heads, size)
    return most % least == 0 and not any(count % size for count in (config.num_heads, *columns))
