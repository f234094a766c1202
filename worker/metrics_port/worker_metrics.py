"""A worker's Prometheus metrics, updated once per report of its engine process, and the port that serves them."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import MetricSet, MetricSpec, export_start_time, wing_specs
from common.metrics_port.pulse import Pulse
from common.metrics_port.server import serve_scrapes
from common.net.rpc import RpcServer
from protos import types_pb2 as pb
from worker.config import WorkerConfig
from worker.front.front import WorkerFront
from worker.messages import Pull, StepReport
from worker.metrics_port.metrics import METRICS
from worker.metrics_port.settings import WorkerMetricsSettings

BLOCK_STATES = ("free", "cached", "used")
NO_TRANSPORT = "none"  # of a pull that failed before a transport was chosen


def open_metrics_port(front: WorkerFront, worker: WorkerConfig, server: RpcServer) -> None:
    """Open a worker's metrics port, if it has one. Raises ConfigError if the port is taken."""
    port = worker.of(WorkerMetricsSettings).metrics_port
    if port:
        WorkerMetrics(front).serve(worker.host, port, server)


class WorkerMetrics:
    """Observes the engine process's reports to a front. `serve` opens the port."""

    def __init__(self, front: WorkerFront) -> None:
        self._front = front
        info = front.info
        labels = {"model_name": info.model, "role": info.role, "worker": info.worker_id}
        self._set = metrics = MetricSet(labels, wings=(*METRICS, *wing_specs("engine")))
        export_start_time(metrics)
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
        self._of_wings = {spec.name: _WingMetric(metrics, spec) for spec in wing_specs("engine")}
        for transport in info.transports:  # start at 0, so that a rate includes the first pull
            metrics.counter("mini_infer_kv_transfers", transport=transport)
            metrics.counter("mini_infer_kv_transfer_bytes", transport=transport)
            metrics.histogram("mini_infer_kv_transfer_seconds", transport=transport)
        for transport in (*info.transports, NO_TRANSPORT):
            metrics.counter("mini_infer_kv_transfer_failures", transport=transport)
        front.listeners.append(self.observe)

    def observe(self, report: StepReport) -> None:
        for name, counter in self._counters.items():
            total = getattr(report, name)
            if total != self._totals[name]:  # few change in a step
                counter.inc(total - self._totals[name])
                self._totals[name] = total
        load = pb.LoadReport.FromString(report.load)
        for name, gauge in self._load.items():
            gauge.set(getattr(load, name))
        total, free, cached = load.kv_blocks_total, load.kv_blocks_free, load.kv_blocks_cached
        for state, count in zip(BLOCK_STATES, (free, cached, total - free - cached), strict=True):
            self._blocks[state].set(count)
        self._usage.set((total - free - cached) / total)
        self._draining.set(self._front.is_draining)
        if load.step_seconds:
            self._observe_step(load)
        for name, values in report.figures.items():
            self._of_wings[name].observe(values)
        for pull in report.pulls:
            self._observe_pull(pull)

    def serve(self, host: str, port: int, server: RpcServer) -> None:
        """Answer scrapes and health checks until the process ends. Raises ConfigError if the port is taken."""
        serve_scrapes(self._set.render, host, port, Pulse(server))

    def _observe_step(self, load: pb.LoadReport) -> None:
        self._prefill_tokens.inc(load.step_prefill_tokens)
        self._decode_tokens.inc(load.step_decode_tokens)
        self._step_tokens.observe(load.step_prefill_tokens + load.step_decode_tokens)
        self._step_seconds.observe(load.step_seconds)

    def _observe_pull(self, pull: Pull) -> None:
        label = pull.transport or NO_TRANSPORT
        if not pull.ok:
            self._set.counter("mini_infer_kv_transfer_failures", transport=label).inc()
            return
        self._set.counter("mini_infer_kv_transfers", transport=label).inc()
        self._set.counter("mini_infer_kv_transfer_bytes", transport=label).inc(pull.num_bytes)
        self._set.histogram("mini_infer_kv_transfer_seconds", transport=label).observe(pull.seconds)


class _WingMetric:
    """A metric that a wing of the engine declares. Its label, if any, is the position of a value."""

    def __init__(self, metrics: MetricSet, spec: MetricSpec) -> None:
        self._metrics, self._spec = metrics, spec
        self._steps = metrics.step_histogram(spec.name) if spec.kind == "histogram" else None
        self._last: Sequence[float] = []
        self.observe([0.0] * max(len(spec.values), 1) if self._steps is None else [])  # shown from the start

    def observe(self, values: Sequence[float]) -> None:
        """values: see `engine.wings.Figures`."""
        if self._steps is not None:
            for value in values:
                self._steps.observe(value)
        elif values != self._last:  # few change in a step
            for number, value in enumerate(values):
                self._set(number, value)
            self._last = values

    def _set(self, number: int, value: float) -> None:
        labels = dict.fromkeys(self._spec.labels, self._spec.values[number] if self._spec.values else str(number))
        if self._spec.kind == "gauge":
            self._metrics.gauge(self._spec.name, **labels).set(value)
        else:
            before = self._last[number] if number < len(self._last) else 0.0
            self._metrics.counter(self._spec.name, **labels).inc(value - before)
