"""Puts an engine together from its settings: device, model, KV pool, scheduler, runner.

The only place that knows all the parts. Where the pool's memory comes from is the caller's (`PoolMemory`): plain
memory for `engine.LLM`, a shareable segment for a worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from common.errors import ConfigError
from common.model_files import ModelFiles, resolve_model
from engine.block_groups import BlockGroups
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.config import GpuConfig
from engine.gpu.failures import LESS_KV, SMALLER_WEIGHTS, explained
from engine.grouped_kv_manager import GroupedKVManager
from engine.kv_manager import KVManager
from engine.kv_memory import (
    DTYPE_NAMES,
    allocate_pool,
    check_kv_dtype,
    context_in_pool,
    host_buffer_over,
    num_blocks_for,
    pool_geometry,
)
from engine.layers.pipeline import WHOLE_MODEL, StageEnds
from engine.parallel.followers import FollowerPool, Followers, place_of
from engine.parallel.remote_stage import RemoteStage
from engine.policy import load_policy
from engine.prompt_budget import budget_for
from engine.scheduler import Scheduler
from engine.speculation.drafter import drafter_for
from engine.speculation.drafts import Speculation
from engine.start_progress import OnProgress, no_progress
from kvstore.layout import PoolGeometry, Shard
from kvstore.pool.block_pool import BlockPool
from kvstore.tier.host_tier import HostTier, LocalHostTier
from kvstore.transport.shared_memory import create_memfd

if TYPE_CHECKING:
    from engine.expert_loads import ExpertLoadRecorder
    from engine.expert_rebalancing import Rebalancer
    from engine.loader.load import LoadedModel
    from engine.models.config import ModelConfig
    from engine.parallel.runner import ParallelRunner

logger = logging.getLogger(__name__)


class PoolMemory(Protocol):
    """Gives the pool its bytes and, if there is one, the host tier behind it."""

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        """A zeroed tensor, see PoolGeometry."""
        ...

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        """A descriptor of zeroed host memory for the pool of a rank in another process."""
        ...

    shares_device_pools: bool
    """Whether pools of other ranks' GPUs are allocated so that this process can map them, and are given to it."""

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        """Take over the pool that a rank in another process has allocated on `device`, and its descriptor."""
        ...

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None: ...


class PrivatePoolMemory:
    """Memory of this process alone."""

    shares_device_pools = False

    def allocate(self, geometry: PoolGeometry, device: torch.device) -> torch.Tensor:
        return allocate_pool(geometry, device)

    def allocate_for_rank(self, geometry: PoolGeometry) -> int:
        return create_memfd("mini-infer-kv", geometry.pool_bytes)

    def adopt_for_rank(self, geometry: PoolGeometry, device: torch.device, fd: int) -> None:
        raise AssertionError("ranks keep their pools to themselves")

    def open_host_tier(self, geometry: PoolGeometry, host_tier_bytes: int) -> HostTier | None:
        num_slots = host_tier_bytes // geometry.block_bytes
        return LocalHostTier(num_slots, geometry.block_bytes) if num_slots else None


@dataclass(frozen=True)
class EngineParts:
    """An engine and what others need to know about it."""

    engine: Engine
    runner: Any  # executes the engine's plans
    files: ModelFiles
    model_config: ModelConfig
    geometry: PoolGeometry
    device: str
    dtype: str  # what the model computes in; geometry.dtype is what KV is stored as
    quantization: str
    max_num_seqs: int
    cuda_graphs: bool
    expert_loads: ExpertLoadRecorder | None = None
    rebalancer: Rebalancer | None = None


def assemble(
    config: EngineConfig,
    memory: PoolMemory | None = None,
    gpu: GpuConfig | None = None,
    is_offline: bool = False,
    on_progress: OnProgress = no_progress,
) -> EngineParts:
    """Load the model and build its engine. Raises ConfigError with what to do.

    is_offline: without services, see `EngineConfig.resolved`.
    """
    with explained(LESS_KV):
        return _assemble(config, memory or PrivatePoolMemory(), gpu or GpuConfig(), is_offline, on_progress)


def _assemble(
    config: EngineConfig, memory: PoolMemory, gpu: GpuConfig, is_offline: bool, on_progress: OnProgress
) -> EngineParts:
    # Here, because they take seconds to import and the settings should be checked first.
    from engine.expert_rebalancing import CountedRunner
    from engine.loader.load import load_model, read_config, resolve_device
    from engine.loader.supported import check_attention

    began = time.monotonic()
    policy = load_policy(config.scheduling_policy)
    files = resolve_model(config.model)
    device = resolve_device(config)
    config = config.resolved(device.type, is_offline)
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    check_kv_dtype(config, device)
    if config.expert_rebalance_interval and device.type == "cuda":
        raise ConfigError(
            "--expert-rebalance-interval moves experts between CPUs only so far: count them with --expert-load-file, "
            "and place them with --expert-placement at the next start"
        )
    if device.type == "cuda" and gpu.attention_backend != "auto":
        check_attention(read_config(files, config), gpu.attention_backend)
    shard, stage = place_of(0, config)
    followers = _start_followers(config, device, gpu) if config.num_ranks > 1 else None
    with explained(SMALLER_WEIGHTS):
        loaded = load_model(files, config, device, shard, on_progress, stage)
    loads, rebalancer = _expert_loads(loaded, config)
    max_model_len = loaded.config.context_length(config.max_model_len)
    if device.type == "cuda" and not (config.num_gpu_blocks or config.kv_cache_gb):
        from engine.gpu.memory import num_blocks_that_fit

        config = replace(config, num_gpu_blocks=num_blocks_that_fit(loaded, config, gpu, max_model_len))
    geometry = pool_geometry(loaded.config, config, loaded.fingerprint, loaded.dtype, loaded.shard)
    others = _other_shards(loaded.config, config)
    if followers is not None:
        found = followers.wait_for_weights()
        if any(one.fingerprint != loaded.fingerprint for one in found):
            raise ConfigError("the stage on the other host holds another model: give both hosts the same files")
        fitting = [one.num_blocks for one in found if one.num_blocks]
        fitting += [num_blocks_for(replace(geometry, shard=other), config) for other in others]
        geometry = replace(geometry, num_blocks=min(geometry.num_blocks, *fitting))
    max_model_len = context_in_pool(max_model_len, geometry, config)
    pool = memory.allocate(geometry, device)
    host_tier = memory.open_host_tier(geometry, int(config.host_tier_gb * 2**30))
    host_buffer = None
    if host_tier is not None:
        host_buffer = host_buffer_over(host_tier.buffer, host_tier.num_slots, geometry.block_bytes)
    if followers is None:
        runner = _make_runner(loaded, pool, host_buffer, config, gpu, max_model_len)
    else:
        runner = _make_parallel_runner(
            loaded, pool, host_buffer, config, gpu, max_model_len, memory, geometry, followers, others
        )
    kv = make_kv_manager(geometry, config, host_tier)
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        preempt_by_swap=config.preemption == "swap",
        policy=policy,
        speculation=_speculation(config, device),
        prompt_budget=budget_for(config),
        num_stages=_num_in_flight(config, device, gpu),
    )
    engine = Engine(
        scheduler,
        runner if loads is None else CountedRunner(runner, loads, rebalancer),
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=frozenset(loaded.config.eos_token_ids),
    )
    runner.warmup(on_progress)
    if loads is not None:
        loads.restart()
    logger.info(
        "%s on %s: %s, %d KV blocks of %d tokens at %d bytes (%.2f GB), KV %s, ready in %.1f s",
        files.name,
        device,
        loaded.quant_mode,
        geometry.num_blocks,
        geometry.block_size,
        geometry.block_bytes // geometry.block_size,
        geometry.pool_bytes / 2**30,
        geometry.layout,
        time.monotonic() - began,
    )
    return EngineParts(
        engine,
        runner,
        files,
        loaded.config,
        geometry,
        str(device),
        DTYPE_NAMES[loaded.dtype],
        loaded.quant_mode,
        config.max_num_seqs,
        cuda_graphs=device.type == "cuda" and gpu.use_cuda_graph,
        expert_loads=loads,
        rebalancer=rebalancer,
    )


def _expert_loads(loaded: LoadedModel, config: EngineConfig) -> tuple[ExpertLoadRecorder | None, Rebalancer | None]:
    """What counts experts, and what places them by that, as far as it is wanted."""
    if not (config.expert_load_file or config.expert_rebalance_interval):
        return None, None
    from engine.expert_loads import ExpertLoadRecorder  # see `_assemble`
    from engine.expert_rebalancing import Rebalancer

    loads = ExpertLoadRecorder(loaded.model, Path(config.expert_load_file) if config.expert_load_file else None)
    interval = config.expert_rebalance_interval
    return loads, Rebalancer(loads, interval) if interval else None


def make_kv_manager(geometry: PoolGeometry, config: EngineConfig, host_tier: HostTier | None) -> KVManager:
    """Block bookkeeping for a pool of that geometry."""
    pool, name = BlockPool(geometry.num_blocks, config.prefix_cache), geometry.fingerprint
    if geometry.layout.has_windows:
        groups = BlockGroups.of(geometry.layout, config.block_size, config.max_num_batched_tokens)
        return GroupedKVManager(pool, groups, name, host_tier, config.prefix_cache)
    return KVManager(pool, config.block_size, name, host_tier, config.prefix_cache)


def _speculation(config: EngineConfig, device: torch.device) -> Speculation | None:
    """On a GPU drafts are in steps that have a decode graph."""
    if not config.num_speculative_tokens:
        return None
    max_decode_tokens = config.max_num_seqs if device.type == "cuda" else None
    return Speculation(drafter_for(config), config.num_speculative_tokens, max_decode_tokens)


def _start_followers(config: EngineConfig, device: torch.device, gpu: GpuConfig) -> Followers | RemoteStage:
    if config.stage_address:
        return RemoteStage(config, device.type, gpu)
    if device.type == "cuda" and torch.cuda.device_count() < config.num_ranks:
        flags = [f"--{name} {size}" for name, size in (("pp", config.pp), ("tp", config.tp)) if size > 1]
        raise ConfigError(
            f"{' '.join(flags)} needs {config.num_ranks} GPUs, and {torch.cuda.device_count()} are visible"
        )
    return Followers(config, device.type, gpu)


def _num_in_flight(config: EngineConfig, device: torch.device, gpu: GpuConfig) -> int:
    """Steps of a pipeline that run at the same time."""
    return config.pp if gpu.overlap or device.type == "cpu" else 1


def _other_shards(model: ModelConfig, config: EngineConfig) -> list[Shard]:
    """What ranks 1, 2, ... have of the model."""
    from engine.loader.staged import divide_layers, shard_of  # see `_assemble`

    layers = divide_layers(model, config.pp)
    places = [place_of(rank, config) for rank in range(1, config.num_ranks)]
    return [shard if stage is None else shard_of(shard, layers[stage.index]) for shard, stage in places]


def _make_parallel_runner(
    loaded: LoadedModel,
    pool: torch.Tensor,
    host_buffer: torch.Tensor | None,
    config: EngineConfig,
    gpu: GpuConfig,
    max_model_len: int,
    memory: PoolMemory,
    geometry: PoolGeometry,
    followers: Followers | RemoteStage,
    shards: Sequence[Shard],
) -> ParallelRunner:
    """Rank 0's runner, with the others behind it. `geometry` is rank 0's, whose number of blocks is everybody's.

    shards: the others'.
    """
    from engine.parallel.group import GlooGroup
    from engine.parallel.runner import ParallelRunner

    num_slots = 0 if host_buffer is None else host_buffer.shape[0]
    is_remote, on_gpu = isinstance(followers, RemoteStage), loaded.device.type == "cuda"
    told = FollowerPool(geometry.num_blocks, num_slots, max_model_len, memory.shares_device_pools and not is_remote)
    group: Any = None
    ends = WHOLE_MODEL
    if isinstance(followers, RemoteStage):
        followers.give_pools(told)
        ends = StageEnds(followers.hidden_source())
    elif on_gpu:
        from engine.gpu.group import open_group
        from engine.gpu.stages import open_ends

        followers.give_pools(told)
        if told.is_shared:
            for rank, (shard, fd) in enumerate(zip(shards, followers.receive(), strict=True), 1):
                memory.adopt_for_rank(replace(geometry, shard=shard), torch.device("cuda", rank), fd)
        if config.tp > 1:
            group = open_group(loaded, config, followers.exchange, followers.folder)
        ends = open_ends(loaded, config, followers.folder)
    else:
        followers.give_pools(told, [memory.allocate_for_rank(replace(geometry, shard=shard)) for shard in shards])
        group = GlooGroup(loaded.shard, followers.folder) if config.tp > 1 else None
        ends = StageEnds(followers.hidden_source()) if config.pp > 1 else WHOLE_MODEL
    local = _make_runner(loaded, pool, host_buffer, config, gpu, max_model_len, group, ends)
    if config.pp == 1:
        return ParallelRunner(local, followers)
    num_in_flight = _num_in_flight(config, loaded.device, gpu)
    return ParallelRunner(local, followers, num_in_flight, is_eager=is_remote or not on_gpu)


def _make_runner(
    loaded: LoadedModel,
    pool: torch.Tensor,
    host_buffer: torch.Tensor | None,
    config: EngineConfig,
    gpu: GpuConfig,
    max_model_len: int,
    group: Any = None,
    ends: StageEnds = WHOLE_MODEL,
) -> Any:
    """The runner for the model's device."""
    if loaded.device.type == "cuda":
        from engine.gpu.runner import GpuRunner  # needs triton

        return GpuRunner(loaded, pool, host_buffer, config, gpu, max_model_len, group, ends)
    if config.simulated_steps:
        from engine.simulated_runner import SimulatedRunner

        return SimulatedRunner(loaded, pool, host_buffer, config)
    from engine.cpu.runner import ModelRunner

    return ModelRunner(loaded, pool, host_buffer, config, group, ends)
