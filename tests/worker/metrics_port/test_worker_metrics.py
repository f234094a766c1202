"""A worker's metrics: reports of the engine process under this worker's labels."""

from __future__ import annotations

import re

import pytest

from common.metrics import counter, gauge, histogram
from engine.request import RequestId
from protos import types_pb2 as pb
from worker.front.front import WorkerFront
from worker.messages import Pull, StepReport
from worker.metrics_port.worker_metrics import WorkerMetrics

IDLE = pb.LoadReport(kv_blocks_total=10).SerializeToString()
INFO = pb.WorkerInfo(model="m", role="decode", worker_id="d", transports=["shm", "tcp"])


def make() -> WorkerMetrics:
    return WorkerMetrics(WorkerFront(None, INFO))  # type: ignore[arg-type]


def value(metrics: WorkerMetrics, name: str, *labels: str) -> float:
    """Return the only sample of that name with these labels and the worker's."""
    wanted = {'model_name="m"', 'role="decode"', 'worker="d"', *labels}
    lines = re.findall(rf"^{name}{{(.*)}} (\S+)$", metrics._set.render().decode(), re.MULTILINE)
    [found] = [float(number) for text, number in lines if set(text.split(",")) == wanted]
    return found


def report(**fields: object) -> StepReport:
    load = pb.LoadReport(
        num_running=3, num_loading=2, kv_blocks_total=10, kv_blocks_free=4, kv_blocks_cached=1, step_seconds=0.02,
        step_prefill_tokens=7, step_decode_tokens=3,
    )  # fmt: skip
    return StepReport(load=load.SerializeToString(), **fields)  # type: ignore[arg-type]


def test_a_step_is_observed_once() -> None:
    metrics = make()
    metrics.observe(report(preemptions=2, prefix_hits=32))
    metrics.observe(report(preemptions=3, prefix_hits=32))
    metrics.observe(StepReport(load=IDLE, preemptions=3, prefix_hits=32))
    assert value(metrics, "vllm:num_preemptions_total") == 3
    assert value(metrics, "vllm:prefix_cache_hits_total") == 32
    assert value(metrics, "mini_infer_step_tokens_total", 'phase="prefill"') == 14
    assert value(metrics, "mini_infer_step_tokens_total", 'phase="decode"') == 6
    assert value(metrics, "mini_infer_step_seconds_count") == 2  # the last report was of no step
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 20


def test_gauges_are_those_of_the_last_report() -> None:
    metrics = make()
    metrics.observe(StepReport(load=IDLE))
    metrics.observe(report())
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "mini_infer_kv_loading") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.5
    assert value(metrics, "mini_infer_kv_blocks", 'state="used"') == 5


def test_transfers_of_all_kinds_are_counted_by_transport() -> None:
    metrics = make()
    pulls = [Pull(RequestId("a"), True, "", "shm", 100, 0.5), Pull(RequestId("b"), False, "no such peer")]
    metrics.observe(report(pulls=[*pulls, Pull(RequestId(""), True, "", "shm", 50, 0.1)]))
    assert value(metrics, "mini_infer_kv_transfers_total", 'transport="shm"') == 2
    assert value(metrics, "mini_infer_kv_transfer_bytes_total", 'transport="shm"') == 150
    assert value(metrics, "mini_infer_kv_transfer_seconds_count", 'transport="tcp"') == 0
    assert value(metrics, "mini_infer_kv_transfer_failures_total", 'transport="none"') == 1


WING = (
    counter("mini_infer_eggs", "Eggs by the nest that has them", "nest"),
    counter("mini_infer_songs", "Songs by how they end", "end", values=("well", "badly")),
    gauge("mini_infer_wingspan", "Of the widest"),
    histogram("mini_infer_flight_seconds", "Duration of a flight", (1.0, 10.0)),
)


def test_metrics_of_a_wing_are_shown_from_the_start_and_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter's totals, a gauge's values and observations, although no code of the worker names them."""
    monkeypatch.setattr("worker.metrics_port.worker_metrics.wing_specs", {"engine": WING}.get)
    metrics = make()
    metrics.observe(report())
    assert value(metrics, "mini_infer_eggs_total", 'nest="0"') == 0
    assert value(metrics, "mini_infer_songs_total", 'end="badly"') == 0
    assert value(metrics, "mini_infer_wingspan") == 0
    assert value(metrics, "mini_infer_flight_seconds_count") == 0
    for eggs in ([6.0, 2.0], [6.0, 2.0], [10.0, 8.5]):
        flights = [0.5, 20.0] if eggs[0] == 10.0 else []
        figures = {"mini_infer_eggs": eggs, "mini_infer_wingspan": [0.75], "mini_infer_flight_seconds": flights}
        metrics.observe(report(figures=figures))
    metrics.observe(report(figures={"mini_infer_songs": [3, 1]}))
    assert value(metrics, "mini_infer_eggs_total", 'nest="0"') == 10
    assert value(metrics, "mini_infer_eggs_total", 'nest="1"') == 8.5
    assert value(metrics, "mini_infer_songs_total", 'end="well"') == 3
    assert value(metrics, "mini_infer_songs_total", 'end="badly"') == 1
    assert value(metrics, "mini_infer_wingspan") == 0.75
    assert value(metrics, "mini_infer_flight_seconds_count") == 2
    assert value(metrics, "mini_infer_flight_seconds_sum") == 20.5
