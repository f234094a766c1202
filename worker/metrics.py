"""A worker's Prometheus metrics, observed once per frame of its engine, and the port that serves them."""

from __future__ import annotations

from typing import Any

from prometheus_client import start_http_server

from common.errors import ConfigError
from common.metrics import MetricSet
from worker.front import WorkerFront

FINISHED_REASONS = ("stop", "length", "prefilled")
BLOCK_STATES = ("free", "cached", "used")


class WorkerMetrics:
    """Listens to a front's frames. `serve` opens the port."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front
        self._set = metrics = MetricSet({"model_name": front.info.model})
        self._counters = {
            "preemptions": metrics.counter("vllm:num_preemptions"),
            "prefix_queries": metrics.counter("vllm:prefix_cache_queries"),
            "prefix_hits": metrics.counter("vllm:prefix_cache_hits"),
        }
        self._totals = dict.fromkeys(self._counters, 0)
        self._load = {
            "num_running": metrics.gauge("vllm:num_requests_running"),
            "num_waiting": metrics.gauge("vllm:num_requests_waiting"),
            "num_swapped": metrics.gauge("vllm:num_requests_swapped"),
            "num_leases": metrics.gauge("mini_infer_kv_leases"),
        }
        self._usage = metrics.gauge("vllm:kv_cache_usage_perc")
        self._blocks = {state: metrics.gauge("mini_infer_kv_blocks", state=state) for state in BLOCK_STATES}
        self._draining = metrics.gauge("mini_infer_draining")
        self._prompt_tokens = metrics.counter("vllm:prompt_tokens")
        self._generation_tokens = metrics.counter("vllm:generation_tokens")
        self._step_tokens = metrics.histogram("vllm:iteration_tokens_total")
        self._queue = metrics.histogram("vllm:request_queue_time_seconds")
        self._prefill = metrics.histogram("vllm:request_prefill_time_seconds")
        self._ended = {r: metrics.counter("vllm:request_success", finished_reason=r) for r in FINISHED_REASONS}
        front.add_listener(self.observe)

    def observe(self, frame: dict[str, Any]) -> None:
        """Apply one frame."""
        for name, counter in self._counters.items():
            total = frame["counters"][name]
            counter.inc(total - self._totals[name])
            self._totals[name] = total
        load = frame["load"]
        for name, gauge in self._load.items():
            gauge.set(load[name])
        total, free, cached = load["kv_blocks_total"], load["kv_blocks_free"], load["kv_blocks_cached"]
        for state, count in zip(BLOCK_STATES, (free, cached, total - free - cached), strict=True):
            self._blocks[state].set(count)
        self._usage.set((total - free - cached) / total)
        self._draining.set(self._front.draining)
        self._prompt_tokens.inc(load["step_prefill_tokens"])
        if load["step_prefill_tokens"] or load["step_decode_tokens"]:
            self._step_tokens.observe(load["step_prefill_tokens"] + load["step_decode_tokens"])
        for delta in frame["deltas"]:
            self._observe_delta(delta)
        for transport, num_bytes, seconds, ok in frame["pulls"]:
            self._observe_pull(transport, num_bytes, seconds, ok)

    def serve(self, host: str, port: int) -> None:
        """Answer scrapes until the process ends. Raises ConfigError when the port is taken."""
        try:
            start_http_server(port, host, self._set.registry)
        except OSError as error:
            raise ConfigError(f"port {port} is taken or not allowed: choose another with --metrics-port") from error

    def _observe_delta(self, delta: list[Any]) -> None:
        _, token_ids, finish_reason, *_, times = delta
        self._generation_tokens.inc(len(token_ids))
        if times is not None:
            self._queue.observe(times["queue_seconds"])
            self._prefill.observe(times["prefill_seconds"])
        if finish_reason in self._ended:
            self._ended[finish_reason].inc()

    def _observe_pull(self, transport: str, num_bytes: int, seconds: float, ok: bool) -> None:
        label = transport or "none"
        if not ok:
            self._set.counter("mini_infer_kv_transfer_failures", transport=label).inc()
            return
        self._set.counter("mini_infer_kv_transfers", transport=label).inc()
        self._set.counter("mini_infer_kv_transfer_bytes", transport=label).inc(num_bytes)
        self._set.histogram("mini_infer_kv_transfer_seconds", transport=label).observe(seconds)
