"""Metrics: the core's list of names, kinds and label sets, and `MetricSet` to observe them.

Names that begin with `vllm:` are those that vLLM's dashboards query; those with `mini_infer_` are our own. A program
makes one `MetricSet` with its constant labels and asks it for the metrics that it fills. Label values come from
fixed sets, never from clients. A wing lists its metrics as METRICS in `metrics.py` of its folder (`wing_specs`).
Nothing here listens on a port: `render` returns the text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common import VERSION
from common.errors import ConfigError
from common.wings import wing_modules

M = TypeVar("M", bound=Gauge | Counter | Histogram)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the text that `render` returns

_LATENCY = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_PER_REQUEST = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric without its constant labels. The exposition format appends `_total` to counters.

    values: values of the label of a wing's metric, in the order of its figures; empty: the figures' indices.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()


def gauge(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", help, labels)


def counter(name: str, help: str, *labels: str, values: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(name, "counter", help, labels, values=values)


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec(name, "histogram", help, labels, buckets)


# Only one kind of service exports a series (docs/decisions/metrics-and-dashboards.md), so that sums over all services
# are right: the router exports requests, workers export steps and blocks, the agent exports host memory.
ROUTER_SPECS: tuple[MetricSpec, ...] = (
    counter("vllm:prompt_tokens", "Prompt tokens of choices that have had their first token"),
    counter("vllm:generation_tokens", "Tokens generated, those of open choices included"),
    counter("vllm:request_success", "Choices that ended, by how", "finished_reason"),
    histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _LATENCY),
    histogram("vllm:inter_token_latency_seconds", "Time between two outputs of a choice", _PER_TOKEN),
    histogram("vllm:request_time_per_output_token_seconds", "Mean time per token after the first", _PER_TOKEN),
    histogram("vllm:e2e_request_latency_seconds", "Arrival to end", _PER_REQUEST),
    histogram("vllm:request_queue_time_seconds", "Waiting for the first step, on the worker", _PER_REQUEST),
    histogram("vllm:request_prefill_time_seconds", "First step to first token, on the worker", _PER_REQUEST),
    histogram("vllm:request_decode_time_seconds", "First token to last token", _PER_REQUEST),
    histogram("vllm:request_inference_time_seconds", "First step to last token", _PER_REQUEST),
    histogram("vllm:request_prompt_tokens", "Prompt length", _TOKENS),
    histogram("vllm:request_generation_tokens", "Output length of a choice", _TOKENS),
    histogram("vllm:request_max_num_generation_tokens", "Output length of a request's longest choice", _TOKENS),
    gauge("mini_infer_open_choices", "Choices before their first token (waiting) and after it (running)", "state"),
    counter("mini_infer_requests_refused", "Requests refused, by HTTP status", "status"),
    counter("mini_infer_migrations", "Choices that went to another worker because theirs failed"),
    counter("mini_infer_moves", "Running choices handed over to another worker by the policy"),
    counter("mini_infer_placements", "Prompts by where they are computed and decoded", "placement"),
    gauge("mini_infer_workers", "Workers as this router sees them, by role and state", "role", "state"),
    gauge("mini_infer_index_blocks", "Block keys in this router's prefix index"),
    gauge("mini_infer_index_workers", "Workers by state of their part of the index", "state"),
    counter("mini_infer_index_expected_tokens", "Prompt tokens that the index expected in a cache"),
    counter("mini_infer_index_regret_tokens", "Of those, tokens that were not there"),
)
START_TIME = gauge("mini_infer_start_time_seconds", "When this service started, Unix time", "version")
SPECS = (*ROUTER_SPECS, START_TIME)


def wing_specs(package: str) -> tuple[MetricSpec, ...]:
    """Return the metrics of a package's wings."""
    return tuple(spec for module in wing_modules(package, "metrics") for spec in module.METRICS)


class StepHistogram:
    """A histogram cheap enough for every token: one bisection and two additions per value.

    It has only the constant labels. Counts are read only on a scrape.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, label_values: list[str]) -> None:
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(label_values, buckets, self._sum)


class _StepFamily(Collector):
    """Step histograms of one name, by their constant labels."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = spec
        self._children: dict[tuple[tuple[str, str], ...], StepHistogram] = {}

    def add(self, labels: Mapping[str, str]) -> StepHistogram:
        child = self._children[tuple(labels.items())] = StepHistogram(self._spec.buckets)
        return child

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [name for name, _ in next(iter(self._children))]
        family = HistogramMetricFamily(self._spec.name, self._spec.help, labels=names)
        for labels, child in self._children.items():
            child.add_to(family, [value for _, value in labels])
        yield family


class MetricSet:
    """The metrics of one program. labels: constant labels, such as model_name.

    shares: another set, whose metrics `render` returns, too; its `labels` have the same names and other values.
    wings: metrics in addition to the core's.
    """

    def __init__(
        self, labels: Mapping[str, str], shares: MetricSet | None = None, wings: Iterable[MetricSpec] = ()
    ) -> None:
        self._specs = {spec.name: spec for spec in (*SPECS, *wings)}
        self._labels = dict(labels)
        self._registry: CollectorRegistry = shares._registry if shares else CollectorRegistry()
        self._made: dict[str, Gauge | Counter | Histogram] = shares._made if shares else {}
        self._step_families: dict[str, _StepFamily] = shares._step_families if shares else {}

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the gauge `name`; `labels` must be those of its spec."""
        return self._child(Gauge, name, labels)

    def counter(self, name: str, **labels: str) -> Counter:
        return self._child(Counter, name, labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        return self._child(Histogram, name, labels)

    def step_histogram(self, name: str) -> StepHistogram:
        """Return the histogram `name` for observations per token. Call it once per name."""
        spec = self._spec_of(name, "histogram", ())
        if name in self._made:
            raise ConfigError(f"metric {name} is a histogram of prometheus_client's already")
        if name not in self._step_families:
            self._step_families[name] = _StepFamily(spec)
            self._registry.register(self._step_families[name])
        return self._step_families[name].add(self._labels)

    def render(self) -> bytes:
        """Return all metrics asked for so far, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _child(self, kind: type[M], name: str, labels: Mapping[str, str]) -> M:
        spec = self._spec_of(name, kind.__name__.lower(), labels)
        metric = self._made.get(name)
        if metric is None:
            names = (*self._labels, *spec.labels)
            buckets: dict[str, Any] = {"buckets": spec.buckets} if spec.buckets else {}
            metric = self._made[name] = kind(name, spec.help, names, registry=self._registry, **buckets)
        assert isinstance(metric, kind)
        return metric.labels(**self._labels, **labels) if self._labels or labels else metric

    def _spec_of(self, name: str, kind: str, labels: Collection[str]) -> MetricSpec:
        spec = self._specs.get(name)
        if spec is None or spec.kind != kind or set(labels) != set(spec.labels):
            raise ConfigError(f"metric {name} is not a {kind} with labels {sorted(labels)}: see common/metrics.py")
        return spec


def export_start_time(metrics: MetricSet) -> None:
    """Export when this service started and its version. Every service does, since `up` has no label for the role."""
    metrics.gauge(START_TIME.name, version=VERSION).set(time.time())
