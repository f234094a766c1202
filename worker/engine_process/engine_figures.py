"""What a report of the engine process says of its engine: load, the step that ended, totals since the start."""

from __future__ import annotations

from engine.assembly import EngineParts
from engine.engine import Engine
from engine.request import SchedulerLoad
from engine.scheduled_step import StepStats
from worker.messages import EngineLoad, StepReport


def add_figures(report: StepReport, parts: EngineParts, num_leases: int, step: StepStats) -> None:
    """Fill in the engine's figures. step: the one that has ended since the last report."""
    load, stats = parts.engine.load(), parts.engine.kv.stats
    report.load = engine_load(parts.engine, load, step, num_leases)
    report.preemptions = load.num_preemptions
    report.prefix_queries, report.prefix_hits = stats.queried_tokens, stats.hit_tokens
    report.figures = parts.engine.figures()


def engine_load(engine: Engine, load: SchedulerLoad, step: StepStats, num_leases: int) -> EngineLoad:
    pool = engine.kv.pool
    return EngineLoad(
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
        step_prefill_tokens=step.num_prefill_tokens,
        step_decode_tokens=step.num_decode_tokens,
        step_context_tokens=step.num_context_tokens,
        step_prompt_pairs=step.num_prompt_pairs,
    )
