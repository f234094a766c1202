"""The specification of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cli.simulation.settings import ClusterConfig
from cli.simulation.worker import WorkerSpec
from engine.simulated.step_cost import SimulatedCost
from router.objectives.objectives import Objectives


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """worker: decode workers; prefill_worker: the others, with blocks of the same size. num_prefill 0: all workers do
    both. hop_seconds: a message between router and worker or client; accept_seconds: the router's time before it
    sends a request on. host_tier_blocks: of each host of workers_per_host."""

    worker: WorkerSpec
    prefill_worker: WorkerSpec
    num_prefill: int
    num_decode: int
    policy: str
    local_prefill_tokens: int
    objectives: Objectives
    hop_seconds: float
    accept_seconds: float
    pull_tokens_per_second: float
    host_tier_blocks: int
    workers_per_host: int


def spec_of(config: ClusterConfig) -> ClusterSpec:
    worker = WorkerSpec(
        SimulatedCost.parse(config.steps), config.num_gpu_blocks, config.block_size, config.max_num_seqs,
        config.max_num_batched_tokens, config.itl_objective_ms / 1e3, config.mixed_ms / 1e3, config.turn_ms / 1e3,
        config.pull_ms / 1e3, config.block_size / config.host_tokens_per_second,
    )  # fmt: skip
    prefill = replace(
        worker, cost=SimulatedCost.parse(config.prefill_steps or config.steps),
        num_blocks=config.prefill_num_gpu_blocks or config.num_gpu_blocks,
    )  # fmt: skip
    return ClusterSpec(
        worker, prefill, config.prefill_workers, config.decode_workers, config.policy, config.local_prefill_tokens,
        Objectives(ttft=config.ttft_objective_ms / 1e3, itl=config.itl_objective_ms / 1e3),
        config.hop_ms / 1e3, config.accept_ms / 1e3, config.pull_tokens_per_second, config.host_tier_blocks,
        config.workers_per_host,
    )  # fmt: skip
