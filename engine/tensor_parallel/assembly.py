"""The runner of rank 0 with the other ranks behind it: processes of this host's, or a stage on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.gpu.config import GpuConfig
from engine.kv.memory import num_blocks_for
from engine.kv.pool_memory import PoolMemory
from engine.pipeline_parallel.ends import WHOLE_MODEL, StageEnds
from engine.pipeline_parallel.remote_stage import RemoteStage
from engine.tensor_parallel.followers import FollowerPool, Followers, place_of
from kvstore.layout import PoolGeometry, Shard

if TYPE_CHECKING:
    from engine.loader.load import LoadedModel
    from engine.models.config import ModelConfig
    from engine.tensor_parallel.runner import ParallelRunner

MakeRunner = Callable[[Any, StageEnds], Any]
"""Makes rank 0's own runner, given its group and the ends of its stage."""


def start_followers(config: EngineConfig, device: torch.device, gpu: GpuConfig) -> Followers | RemoteStage | None:
    """Start the ranks behind this one; None when it is alone. Raises ConfigError without GPUs for them."""
    if config.num_ranks == 1:
        return None
    if config.stage_address:
        return RemoteStage(config, device.type, gpu)
    if device.type == "cuda" and torch.cuda.device_count() < config.num_ranks:
        flags = [f"--{name} {size}" for name, size in (("pp", config.pp), ("tp", config.tp)) if size > 1]
        raise ConfigError(
            f"{' '.join(flags)} needs {config.num_ranks} GPUs, and {torch.cuda.device_count()} are visible"
        )
    return Followers(config, device.type, gpu)


def common_num_blocks(
    followers: Followers | RemoteStage, loaded: LoadedModel, geometry: PoolGeometry, config: EngineConfig
) -> int:
    """Blocks for which all ranks have room. Raises ConfigError when one of them holds another model."""
    found = followers.wait_for_weights()
    if any(one.fingerprint != loaded.fingerprint for one in found):
        raise ConfigError("the stage on the other host holds another model: give both hosts the same files")
    shards = _other_shards(loaded.config, config)
    asked_for = [num_blocks_for(replace(geometry, shard=shard), config) for shard in shards]
    fitting = [one.num_blocks for one in found if one.num_blocks]
    return min(geometry.num_blocks, *fitting, *asked_for)


def num_steps_in_flight(config: EngineConfig, device: torch.device, gpu: GpuConfig) -> int:
    """Steps of a pipeline that run at the same time."""
    return config.pp if gpu.overlap or device.type == "cpu" else 1


def parallel_runner(
    make_runner: MakeRunner,
    followers: Followers | RemoteStage,
    loaded: LoadedModel,
    memory: PoolMemory,
    geometry: PoolGeometry,
    host_tier_slots: int,
    max_model_len: int,
    config: EngineConfig,
    gpu: GpuConfig,
) -> ParallelRunner:
    """Give all ranks their pools and join them. geometry: rank 0's, whose number of blocks is everybody's."""
    from engine.tensor_parallel.group import GlooGroup
    from engine.tensor_parallel.runner import ParallelRunner

    is_remote, on_gpu = isinstance(followers, RemoteStage), loaded.device.type == "cuda"
    is_shared = memory.shares_device_pools and not is_remote
    told = FollowerPool(geometry.num_blocks, host_tier_slots, max_model_len, is_shared)
    others = [replace(geometry, shard=shard) for shard in _other_shards(loaded.config, config)]
    group: Any = None
    ends = WHOLE_MODEL
    if isinstance(followers, RemoteStage):
        followers.give_pools(told)
        ends = StageEnds(followers.hidden_source())
    elif on_gpu:
        from engine.pipeline_parallel.gpu_stages import open_ends
        from engine.tensor_parallel.gpu_group import open_group

        followers.give_pools(told)
        if is_shared:
            for rank, (other, fd) in enumerate(zip(others, followers.receive(), strict=True), 1):
                memory.adopt_for_rank(other, torch.device("cuda", rank), fd)
        if config.tp > 1:
            group = open_group(loaded, config, followers.exchange, followers.folder)
        ends = open_ends(loaded, config, followers.folder)
    else:
        followers.give_pools(told, [memory.allocate_for_rank(other) for other in others])
        group = GlooGroup(loaded.shard, followers.folder) if config.tp > 1 else None
        ends = StageEnds(followers.hidden_source()) if config.pp > 1 else WHOLE_MODEL
    local = make_runner(group, ends)
    if config.pp == 1:
        return ParallelRunner(local, followers)
    num_in_flight = num_steps_in_flight(config, loaded.device, gpu)
    return ParallelRunner(local, followers, num_in_flight, is_eager=is_remote or not on_gpu)


def _other_shards(model: ModelConfig, config: EngineConfig) -> list[Shard]:
    """What ranks 1, 2, ... have of the model."""
    from engine.loader.staged import divide_layers, shard_of

    layers = divide_layers(model, config.pp)
    places = [place_of(rank, config) for rank in range(1, config.num_ranks)]
    return [shard if stage is None else shard_of(shard, layers[stage.index]) for shard, stage in places]
