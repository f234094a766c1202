"""A process's context among ranks on GPUs: its shard of layers and vocabulary, and the adjacent stages."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.expert_balancing.gpu_moves import bytes_of_moves, open_rearranger
from engine.expert_balancing.settings import ExpertBalancingSettings
from engine.expert_parallel.gpu_divided_rows import DividedSeams
from engine.gpu.ops.rules import GpuSeams
from engine.gpu.steps.rows import most_tokens
from engine.loader.load import LoadedModel
from engine.pipeline_parallel.ends import HiddenInbox, HiddenSource
from engine.pipeline_parallel.gpu_stages import ends_alone, stage_bytes
from engine.ranks import EMBEDDING, NO_LISTENER, HiddenSink, RankContext
from engine.tensor_parallel.gpu_group import DeviceGroup, group_bytes
from engine.tensor_parallel.gpu_ops import ShardSeams


def shard_seams(group: DeviceGroup, vocab_size: int) -> ShardSeams:
    """Return the seams of a rank of the group. vocab_size: of the whole model."""
    return ShardSeams(group, vocab_size) if group.rows is None else DividedSeams(group, vocab_size)


def gpu_ranks(
    loaded: LoadedModel,
    config: EngineConfig,
    group: DeviceGroup | None = None,
    source: HiddenSource | None = None,
    sink: HiddenSink | None = None,
) -> RankContext[GpuSeams]:
    """Return this process's context. group: of the ranks with the other shards. source, sink: adjacent stages."""
    seams = GpuSeams() if group is None else shard_seams(group, loaded.config.vocab_size)
    inbox, listener = EMBEDDING, NO_LISTENER
    if source is not None:
        shape = most_tokens(config), loaded.config.hidden_size
        inbox = HiddenInbox(source, torch.zeros(shape, dtype=loaded.dtype, device=loaded.device))
    if config.of(ExpertBalancingSettings).expert_rebalance_interval and group is not None:
        listener = open_rearranger(loaded, group)
    return RankContext(seams, inbox, sink, listener)


def in_trials(loaded: LoadedModel, config: EngineConfig) -> tuple[int, RankContext[GpuSeams]]:
    """Return, for `num_blocks_that_fit`, the memory of the rank's collectives, and its context without others."""
    of_ranks = group_bytes(loaded, config) + stage_bytes(loaded, config) + bytes_of_moves(loaded, config)
    return of_ranks, gpu_ranks(loaded, config, None, *ends_alone(loaded))
