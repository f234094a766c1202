"""Figures of reports: how a request spent its time; the engine's load, last step and totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.engine import Engine
from engine.request import Request, SchedulerLoad
from engine.scheduled_step import StepStats
from protos import types_pb2 as pb
from worker.messages import Pull, StepReport


@dataclass(slots=True)
class OpenRequest:
    """An open request, with its times, all by time.monotonic, its deadline and its KV pull."""

    request: Request
    arrived: float
    deadline: float  # inf: none
    started: float = 0.0  # time of its first step or KV pull; 0: still waiting
    reported: bool = False
    part_digests: list[list[int]] = field(default_factory=list)  # by rank, for blocks leased while it computes
    times: pb.RequestTimes = field(default_factory=pb.RequestTimes)

    def start_pull(self, num_tokens: int, now: float) -> None:
        self.started = now
        self.times.num_pulled_tokens = num_tokens

    def finish_pull(self, pull: Pull, now: float) -> None:
        self.times.kv_pull_seconds = now - self.started
        self.times.transport = pull.transport
        self.times.kv_pull_failed = not pull.ok
        if not pull.ok:
            self.times.num_pulled_tokens = 0

    def take_times(self, now: float) -> pb.RequestTimes | None:
        """Return how the time until the first delta was spent; None after the first call."""
        if self.reported:
            return None
        self.reported, times = True, self.times
        times.queue_seconds = max(self.started - self.arrived, 0.0)
        times.prefill_seconds = max(now - self.started - times.kv_pull_seconds, 0.0)
        times.num_cached_tokens = self.request.num_cached_tokens
        times.num_prefetched_tokens = self.request.num_prefetched_tokens
        return times


def add_figures(report: StepReport, engine: Engine, num_leases: int, step: StepStats) -> None:
    """Fill in the engine's figures. step: statistics of the step that ended since the last report."""
    load, stats = engine.load(), engine.kv.stats
    report.load = engine_load(engine, load, step, num_leases).SerializeToString()
    report.preemptions = load.num_preemptions
    report.prefix_queries, report.prefix_hits = stats.queried_tokens, stats.hit_tokens
    report.figures = engine.figures()


def engine_load(engine: Engine, load: SchedulerLoad, step: StepStats, num_leases: int) -> pb.LoadReport:
    """Return the engine's part of the load report for routers."""
    pool = engine.kv.pool
    return pb.LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_swapped=load.num_swapped,
        num_loading=load.num_loading,
        num_leases=num_leases,
        kv_blocks_total=pool.num_blocks,
        kv_blocks_free=pool.num_free,
        kv_blocks_cached=pool.num_cached,
        waiting_prefill_tokens=load.waiting_prefill_tokens,
        waiting_prefill_pairs=load.waiting_prefill_pairs,
        context_tokens=load.context_tokens,
        num_steps=engine.num_steps,
        step_seconds=step.seconds,
        step_prefill_tokens=step.size.num_prompt_tokens,
        step_decode_tokens=step.size.num_decode_tokens,
        step_context_tokens=step.size.context,
        step_prompt_pairs=step.size.pairs,
    )
