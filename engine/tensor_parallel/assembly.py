"""Assembles a process's place among ranks, and for rank 0 the other ranks: processes here, or a stage elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigError
from engine.config import EngineConfig, GpuConfig
from engine.expert_balancing.moves import ExpertRearranger, linear_experts
from engine.expert_balancing.settings import ExpertBalancingSettings
from engine.expert_parallel.divided_rows import seams_of
from engine.kv.memory import PoolMemory, num_blocks_for
from engine.pipeline_parallel.ends import HiddenInbox, HiddenSource, StageSeams
from engine.pipeline_parallel.remote_stage import RemoteStage
from engine.ranks import EMBEDDING, NO_LISTENER, HiddenSink, RankContext, Ranks, Seams
from engine.tensor_parallel.followers import FollowerPool, Followers, place_of
from engine.tensor_parallel.group import GlooGroup
from engine.tensor_parallel.runner import ParallelRunner
from engine.tensor_parallel.seams import Group
from kvstore.layout import PoolGeometry, Shard

if TYPE_CHECKING:
    from engine.loader.load import LoadedModel
    from engine.models.config import ModelConfig


def cpu_ranks(
    loaded: LoadedModel,
    config: EngineConfig,
    group: Group | None = None,
    source: HiddenSource | None = None,
    sink: HiddenSink | None = None,
) -> RankContext[Seams]:
    """Return this process's context. group: of the ranks with the other shards. source, sink: adjacent stages."""
    seams = Seams() if group is None else seams_of(loaded.model, group, loaded.config.vocab_size)
    inbox, listener = EMBEDDING, NO_LISTENER
    if source is not None:  # in float32, like the residual
        inbox = HiddenInbox(source, torch.zeros(config.max_num_batched_tokens, loaded.config.hidden_size))
    if source is not None or sink is not None:
        seams = StageSeams(seams, inbox, passes_on=sink is not None)
    if config.of(ExpertBalancingSettings).expert_rebalance_interval and group is not None:
        listener = ExpertRearranger(linear_experts(loaded.model.blocks), group)
    return RankContext(seams, inbox, sink, listener)


class FollowedRanks(Ranks):
    """Rank 0 of several ranks."""

    def __init__(self, config: EngineConfig, device: torch.device, gpu: GpuConfig) -> None:
        """Start the other ranks. Raises ConfigError if there are not enough GPUs."""
        self.shard, self.stage = place_of(0, config)
        self.num_stages = config.pp if gpu.overlap else 1
        self._config = config
        self._followers: Followers | RemoteStage
        if config.stage_address:
            self._followers = RemoteStage(config, device.type, gpu)
            return
        if device.type == "cuda" and torch.cuda.device_count() < config.num_ranks:
            flags = [f"--{name} {size}" for name, size in (("pp", config.pp), ("tp", config.tp)) if size > 1]
            raise ConfigError(
                f"{' '.join(flags)} needs {config.num_ranks} GPUs, and {torch.cuda.device_count()} are visible"
            )
        self._followers = Followers(config, device.type, gpu)

    def in_trials(self, loaded: LoadedModel, config: EngineConfig) -> tuple[Any, ...]:
        from engine.tensor_parallel.gpu_seams import in_trials  # needs triton

        return in_trials(loaded, config)

    def num_blocks(self, loaded: LoadedModel, geometry: PoolGeometry, config: EngineConfig) -> int:
        found = self._followers.wait_for_weights()
        if any(one.fingerprint != loaded.fingerprint for one in found):
            raise ConfigError("the stage on the other host holds another model: give both hosts the same files")
        asked_for = [num_blocks_for(replace(geometry, shard=shard), config) for shard in self._others(loaded.config)]
        fitting = [one.num_blocks for one in found if one.num_blocks]
        return min(geometry.num_blocks, *fitting, *asked_for)

    def runner(
        self, make: Callable[..., Any], loaded: LoadedModel, memory: PoolMemory, geometry: PoolGeometry,
        num_host_slots: int, max_model_len: int,
    ) -> ParallelRunner:  # fmt: skip
        """See Ranks: give pools to all ranks and join them. geometry: rank 0's, with the common number of blocks."""
        config, followers, on_gpu = self._config, self._followers, loaded.device.type == "cuda"
        is_remote = isinstance(followers, RemoteStage)
        is_shared = memory.shares_device_pools and not is_remote
        told = FollowerPool(geometry.num_blocks, num_host_slots, max_model_len, is_shared)
        others = [replace(geometry, shard=shard) for shard in self._others(loaded.config)]
        group: Any = None
        source: HiddenSource | None = None
        sink: HiddenSink | None = None
        if isinstance(followers, RemoteStage):
            followers.give_pools(told)
            source = followers.hidden_source()
        elif on_gpu:
            from engine.pipeline_parallel.gpu_stages import open_ends  # both need triton
            from engine.tensor_parallel.gpu_group import open_group

            followers.give_pools(told)
            if is_shared:
                for rank, (other, fd) in enumerate(zip(others, followers.receive(), strict=True), 1):
                    memory.adopt_for_rank(other, torch.device("cuda", rank), fd)
            if config.tp > 1:
                group = open_group(loaded, config, followers.exchange, followers.folder)
            source, sink = open_ends(loaded, config, followers.folder)
        else:
            followers.give_pools(told, [memory.allocate_for_rank(other) for other in others])
            group = GlooGroup(loaded.shard, followers.folder) if config.tp > 1 else None
            source = followers.hidden_source() if config.pp > 1 else None
        local = make(_ranks_on_device(loaded, config, group, source, sink))
        if config.pp == 1:
            return ParallelRunner(local, followers)
        return ParallelRunner(local, followers, self.num_stages, is_eager=is_remote or not on_gpu)

    def _others(self, model: ModelConfig) -> list[Shard]:
        """Return the shards of ranks 1, 2, ..."""
        from engine.pipeline_parallel.staged import divide_layers, shard_of

        layers = divide_layers(model, self._config.pp)
        places = [place_of(rank, self._config) for rank in range(1, self._config.num_ranks)]
        return [shard if stage is None else shard_of(shard, layers[stage.index]) for shard, stage in places]


def _ranks_on_device(loaded: LoadedModel, *parts: Any) -> RankContext[Any]:
    if loaded.device.type == "cpu":
        return cpu_ranks(loaded, *parts)
    from engine.tensor_parallel.gpu_seams import gpu_ranks  # needs triton

    return gpu_ranks(loaded, *parts)
