"""`mini-infer simulate --against URL`: compares a simulation with a running cluster under the same load.

First come random requests, during which the cluster is asked for its step times, and some requests one at a time;
then the trace. The simulation gets each request at the time when it was really sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from cli.client.api_client import ApiClient, first_model
from cli.client.event_stream import RequestRecord
from cli.load.bench import TargetConfig, WorkloadConfig, drive, plan
from cli.load.results import Objectives, summarize
from cli.load.workload import PlannedRequest
from cli.simulation.calibration import calibrated_by, steps_of
from cli.simulation.cluster import SimulatedCluster
from cli.simulation.settings import ClusterConfig
from cli.simulation.specs import spec_of
from common.config import require
from common.pairs import num_pairs
from engine.simulated.step_cost import SimulatedCost

FITS = 3
NUM_ALONE = 30
SEEN = 0.75  # a parabola is used if its errors are below this share of a line's
LOOK_SECONDS = 1.0  # interval of queries; a cluster's measurements of its steps fade after about 50 seconds
PAUSE_SECONDS = 5.0  # between loads
HAND_OVER_MESSAGES = 2  # from the prefill worker to the router, and on to the decode worker
MEAN, TAIL = 0.05, 0.10  # target errors: of throughput and means, of 99th percentiles


@dataclasses.dataclass(frozen=True)
class Compared:
    """A figure of cluster and simulation, and the target for its error; 0: none."""

    name: str
    measured: float
    simulated: float
    target: float

    @property
    def error(self) -> float:
        """The error relative to the measured value."""
        return self.simulated / self.measured - 1.0

    @property
    def is_met(self) -> bool:
        return not self.target or abs(self.error) <= self.target


@dataclasses.dataclass(frozen=True)
class Sent:
    """A load in the order in which the cluster got it: requests with these times, and their records."""

    planned: list[PlannedRequest]
    records: list[RequestRecord]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each prompt."""
        return [len(request.prompt) for request in self.planned]


def against(url: str, config: ClusterConfig, workload: WorkloadConfig) -> dict[str, Any]:
    """Compare, print a table, and return plain values for JSON. Raises ConfigError."""
    require(bool(workload.trace), "--against replays a --trace")
    require(workload.vocab_size > 0, "--against needs --vocab-size: prompts of token ids are as long for both")
    load = dataclasses.replace(workload, trace="", request_rate=workload.request_rate or _rate(workload))
    target = TargetConfig(url, first_model(url, config.api_key), config.api_key)
    alone = dataclasses.replace(
        load, request_rate=0.0, concurrency=1, num_requests=NUM_ALONE, output_len="2", seed=workload.seed + NUM_ALONE
    )
    looks: list[Mapping[str, Any]] = []
    with ApiClient(url, config.api_key) as client:
        crowd = _send(target, load, client, looks)
        made = calibrated_by(dataclasses.replace(config, like=url), looks)
        roles = [worker["role"] for worker in client.get_json("/v1/cluster")["workers"]]
        made = dataclasses.replace(made, prefill_workers=roles.count("prefill"), decode_workers=roles.count("decode"))
        made = fitted(made, crowd, _send(target, alone, client, []))
        replayed = _send(target, workload, client, [])
    rows = compared(replayed.records, _simulated(made, crowd, replayed)[-len(replayed.records) :])
    show(rows, made, Console(stderr=True))
    return {
        "cluster": dataclasses.asdict(made), "workload": dataclasses.asdict(workload),
        "compared": [dataclasses.asdict(row) | {"error": row.error, "is_met": row.is_met} for row in rows],
    }  # fmt: skip


def fitted(config: ClusterConfig, crowd: Sent, alone: Sent) -> ClusterConfig:
    """Adjust the settings until the medians of both loads match the measurements.

    `base` follows the gaps of the crowd, prompt tokens and messages the first and second tokens of requests that were
    alone, and the router's time all first tokens. A cluster's own measurements of its steps contain outliers, which
    medians leave out.
    """
    for _ in range(FITS):
        cost = SimulatedCost.parse(config.steps)
        longer = _median_gap(crowd.records) - _median_gap(_simulated(config, crowd))
        late = _late(alone, _simulated(config, alone))
        per_pair, per_token = _parabola(alone.lengths, late, -cost.prompt_context)
        late += _late(crowd, _simulated(config, crowd))
        lengths = alone.lengths + crowd.lengths
        rest = median(
            seconds - per_pair * num_pairs(0, length) - per_token * length
            for length, seconds in zip(lengths, late, strict=True)
        )
        cost = dataclasses.replace(
            cost, base=max(cost.base + longer, 0.0), prompt_context=cost.prompt_context + per_pair,
            prompt_token=max(cost.prompt_token + per_token, 0.0),
        )  # fmt: skip
        accept_ms = max(config.accept_ms + 1e3 * rest, 0.0)
        config = dataclasses.replace(
            config, steps=steps_of(dataclasses.asdict(cost)), accept_ms=accept_ms,
            hop_ms=max(config.hop_ms + 1e3 * _late_hand_over(config, alone) / HAND_OVER_MESSAGES, 0.0),
        )  # fmt: skip
    return config


def _late(sent: Sent, simulated: Sequence[RequestRecord]) -> list[float]:
    """Return the seconds by which each first token came later than in the simulation."""
    return [real.ttft - made.ttft for real, made in zip(sent.records, simulated, strict=True)]


def _late_hand_over(config: ClusterConfig, alone: Sent) -> float:
    """Return by how many seconds second tokens from another worker are later than in the simulation."""
    if not config.prefill_workers:
        return 0.0
    late = [
        record.gaps[0] - simulated.gaps[0]
        for record, simulated in zip(alone.records, _simulated(config, alone), strict=True)
        if record.num_prompt_tokens > config.local_prefill_tokens and record.gaps  # no gap if two tokens came as one
    ]
    return median(late or [0.0])


def _median_gap(records: Sequence[RequestRecord]) -> float:
    return median(gap for record in records for gap in record.gaps)


def _parabola(x: Sequence[float], y: Sequence[float], least: float) -> tuple[float, float]:
    """Fit a and b of a x^2 / 2 + b x + c by medians. a is `least` unless a larger one is clearly visible, since
    beyond the measured points it would matter more than among them."""
    chords = [((x1 + x2) / 2, (y2 - y1) / (x2 - x1)) for (x1, y1), (x2, y2) in _pairs(x, y)]
    found = []
    for a in (least, max(_slope(*zip(*chords, strict=True)), least) if chords else least):
        straight = [there - a * num_pairs(0, at) for at, there in zip(x, y, strict=True)]
        b = _slope(x, straight)
        rests = [there - b * at for at, there in zip(x, straight, strict=True)]
        middle = median(rests)
        found.append((median(abs(rest - middle) for rest in rests), a, b))
    (flat, *line), (curved, *parabola) = found
    a, b = parabola if curved < SEEN * flat else line
    return a, b


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit a line by the median slope of all pairs (Theil and Sen), which is robust to outliers."""
    return median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in _pairs(x, y)] or [0.0])


def _pairs(x: Sequence[float], y: Sequence[float]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return all pairs of points that differ in x."""
    both = itertools.combinations(zip(x, y, strict=True), 2)
    return [(first, second) for first, second in both if first[0] != second[0]]


def compared(measured: Sequence[RequestRecord], simulated: Sequence[RequestRecord]) -> list[Compared]:
    first, second = _summary(measured), _summary(simulated)
    name = "output_tokens_per_second"
    rows = [Compared("tok/s", first[name], second[name], MEAN)]
    for title, name in (("TTFT", "ttft_ms"), ("gap", "itl_ms"), ("request", "e2e_ms")):
        for quantile, target in (("mean", MEAN), ("p50", 0.0), ("p99", TAIL)):
            rows.append(Compared(f"{title} {quantile}, ms", first[name][quantile], second[name][quantile], target))
    return rows


def show(rows: Sequence[Compared], config: ClusterConfig, console: Console) -> None:
    table = Table("", "measured", "simulated", "error", "asked")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        style = "" if row.is_met else "red"
        asked = f"{row.target:.0%}" if row.target else ""
        table.add_row(
            row.name, f"{row.measured:.1f}", f"{row.simulated:.1f}", f"{row.error:+.1%}", asked, style=style
        )
    console.print(table)
    messages = f"a message takes {config.hop_ms:.2f} ms, to accept a request {config.accept_ms:.2f} ms"
    console.print(f"{messages}; steps {config.steps}", highlight=False, soft_wrap=True)


def _rate(workload: WorkloadConfig) -> float:
    """Return the trace's mean requests per second."""
    _, planned = plan(workload)
    times = [request.at_seconds for request in planned]
    return len(times) / max(times[-1], 1e-9)


def _send(target: TargetConfig, workload: WorkloadConfig, client: ApiClient, looks: list[Mapping[str, Any]]) -> Sent:
    """Send a load. looks: gets the states of workers during the load."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_SECONDS):
            looks.extend(client.get_json("/v1/cluster")["workers"])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        records, _ = uvloop.run(drive(target, workload))
    finally:
        is_over.set()
        looking.join()
    failed = [record.error for record in records if record.error]
    require(not failed, f"--against {target.url}: {len(failed)} requests failed: {failed[:1]}")
    records.sort(key=lambda record: record.scheduled)
    sent = zip(records, plan(workload)[1], strict=True)
    pairs = sorted(sent, key=lambda pair: pair[0].sent)
    planned = [dataclasses.replace(request, at_seconds=record.sent) for record, request in pairs]
    return Sent(planned, [record for record, _ in pairs])


def _simulated(config: ClusterConfig, *loads: Sent) -> list[RequestRecord]:
    """Simulate consecutive loads, since routers learn from the first; return records in the order of requests."""
    cluster, begin = SimulatedCluster(spec_of(config)), 0.0
    everything: list[PlannedRequest] = []
    for load in loads:
        everything += [
            dataclasses.replace(request, at_seconds=begin + request.at_seconds) for request in load.planned
        ]
        begin = everything[-1].at_seconds + PAUSE_SECONDS
    cluster.run(everything)
    return sorted(cluster.records, key=lambda record: record.sent)


def _summary(records: Sequence[RequestRecord]) -> dict[str, Any]:
    duration = max(record.end for record in records) - min(record.sent for record in records)
    return summarize(records, duration, Objectives())
