"""A worker's Prometheus metrics, observed once per report of its engine process, and the port that serves them."""

from __future__ import annotations

from collections.abc import Callable

from common.metrics import MetricSet, export_start_time
from common.net.scrape import serve_scrapes
from worker.front.front import WorkerFront
from worker.messages import EngineLoad, Prefetched, PrefetchOutcome, Pull, StepReport

BLOCK_STATES = ("free", "cached", "used")
NO_TRANSPORT = "none"  # of a pull that failed before one was chosen


class WorkerMetrics:
    """Observes the reports that a front gets of its engine process. `serve` opens the port."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front
        info = front.info
        self._set = metrics = MetricSet({"model_name": info.model, "role": info.role, "worker": info.worker_id})
        export_start_time(metrics)
        self._counters = {
            "preemptions": metrics.counter("vllm:num_preemptions"),
            "prefix_queries": metrics.counter("vllm:prefix_cache_queries"),
            "prefix_hits": metrics.counter("vllm:prefix_cache_hits"),
            "host_hit_tokens": metrics.counter("mini_infer_host_tier_hit_tokens"),
            "host_stored_blocks": metrics.counter("mini_infer_host_tier_stored_blocks"),
            "draft_tokens": metrics.counter("vllm:spec_decode_num_draft_tokens"),
            "expert_placements": metrics.counter("mini_infer_expert_placements"),
            "accepted_tokens": metrics.counter("vllm:spec_decode_num_accepted_tokens"),
        }
        self._totals = dict.fromkeys(self._counters, 0)
        self._load = {
            "num_running": metrics.gauge("vllm:num_requests_running"),
            "num_waiting": metrics.gauge("vllm:num_requests_waiting"),
            "num_swapped": metrics.gauge("vllm:num_requests_swapped"),
            "num_loading": metrics.gauge("mini_infer_kv_loading"),
            "num_leases": metrics.gauge("mini_infer_kv_leases"),
        }
        self._usage = metrics.gauge("vllm:kv_cache_usage_perc")
        self._blocks = {state: metrics.gauge("mini_infer_kv_blocks", state=state) for state in BLOCK_STATES}
        self._draining = metrics.gauge("mini_infer_draining")
        self._prefill_tokens = metrics.counter("mini_infer_step_tokens", phase="prefill")
        self._decode_tokens = metrics.counter("mini_infer_step_tokens", phase="decode")
        self._step_tokens = metrics.step_histogram("vllm:iteration_tokens_total")
        self._step_seconds = metrics.step_histogram("mini_infer_step_seconds")
        self._step_ratio = metrics.step_histogram("mini_infer_step_seconds_over_predicted")
        self._expert_tokens = [metrics.counter("mini_infer_expert_tokens", rank="0")]  # of others when they report
        self._expert_totals = [0.0]
        self._balancedness = metrics.gauge("mini_infer_expert_balancedness")
        self._prefetches = {
            outcome: metrics.counter("mini_infer_kv_prefetches", outcome=outcome.value) for outcome in PrefetchOutcome
        }
        self._prefetched_tokens = metrics.counter("mini_infer_kv_prefetched_tokens")
        for transport in info.transports:  # at 0: a rate begins with the first pull
            metrics.counter("mini_infer_kv_transfers", transport=transport)
            metrics.counter("mini_infer_kv_transfer_bytes", transport=transport)
            metrics.histogram("mini_infer_kv_transfer_seconds", transport=transport)
        for transport in (*info.transports, NO_TRANSPORT):
            metrics.counter("mini_infer_kv_transfer_failures", transport=transport)
        front.on_report = self.observe

    def observe(self, report: StepReport) -> None:
        for name, counter in self._counters.items():
            total = getattr(report, name)
            if total != self._totals[name]:  # few change in a step
                counter.inc(total - self._totals[name])
                self._totals[name] = total
        load = report.load
        for name, gauge in self._load.items():
            gauge.set(getattr(load, name))
        total, free, cached = load.kv_blocks_total, load.kv_blocks_free, load.kv_blocks_cached
        for state, count in zip(BLOCK_STATES, (free, cached, total - free - cached), strict=True):
            self._blocks[state].set(count)
        self._usage.set((total - free - cached) / total)
        self._draining.set(self._front.drain.is_active)
        if load.step_seconds:
            self._observe_step(load)
            if report.step_predicted_seconds:
                self._step_ratio.observe(load.step_seconds / report.step_predicted_seconds)
        self._balancedness.set(report.expert_balancedness)
        if report.expert_rank_tokens not in ([], self._expert_totals):  # it changes every few seconds
            self._observe_experts(report.expert_rank_tokens)
        for pull in report.pulls:
            self._observe_pull(pull)
        for prefetched in report.prefetches:
            self._observe_prefetch(prefetched)

    def serve(self, host: str, port: int, is_ready: Callable[[], bool]) -> None:
        """Answer scrapes and health checks until the process ends. Raises ConfigError when the port is taken."""
        serve_scrapes(self._set.render, host, port, is_ready)

    def _observe_step(self, load: EngineLoad) -> None:
        self._prefill_tokens.inc(load.step_prefill_tokens)
        self._decode_tokens.inc(load.step_decode_tokens)
        self._step_tokens.observe(load.step_prefill_tokens + load.step_decode_tokens)
        self._step_seconds.observe(load.step_seconds)

    def _observe_experts(self, rank_tokens: list[float]) -> None:
        for rank in range(len(self._expert_tokens), len(rank_tokens)):
            self._expert_tokens.append(self._set.counter("mini_infer_expert_tokens", rank=str(rank)))
            self._expert_totals.append(0.0)
        for counter, total, before in zip(self._expert_tokens, rank_tokens, self._expert_totals, strict=True):
            counter.inc(total - before)
        self._expert_totals = rank_tokens

    def _observe_pull(self, pull: Pull) -> None:
        label = pull.transport or NO_TRANSPORT
        if not pull.ok:
            self._set.counter("mini_infer_kv_transfer_failures", transport=label).inc()
            return
        self._observe_transfer(label, pull.num_bytes, pull.seconds)

    def _observe_prefetch(self, prefetched: Prefetched) -> None:
        self._prefetches[prefetched.outcome].inc()
        self._prefetched_tokens.inc(prefetched.num_tokens)
        if prefetched.outcome is PrefetchOutcome.PULLED:
            self._observe_transfer(prefetched.transport, prefetched.num_bytes, prefetched.seconds)

    def _observe_transfer(self, transport: str, num_bytes: int, seconds: float) -> None:
        self._set.counter("mini_infer_kv_transfers", transport=transport).inc()
        self._set.counter("mini_infer_kv_transfer_bytes", transport=transport).inc(num_bytes)
        self._set.histogram("mini_infer_kv_transfer_seconds", transport=transport).observe(seconds)
