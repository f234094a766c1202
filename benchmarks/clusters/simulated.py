"""Aggregated, static and adaptive clusters in simulated time: the router's policy, the engine's scheduler, two GPUs.

    python -m benchmarks.clusters.simulated --loads azure:10:20:40,mooncake:1:2:4
    python -m benchmarks.clusters.simulated --measured docs/data/cluster_2xh200.json

Requests are the trace's own, in its order and rhythm, so many a second; the first seconds are not counted, since
nobody has measured a worker yet. One row a cluster, and how the adaptive one compares: its goodput with the better of
the others, its tok/s with aggregated's, its TTFT at p99 with aggregated's and with that of the better one.

`--measured` replays cells that GPUs have measured and shows both: with fixed placements, one after the other as they
were sent, and closed loops with all. Whether steps that have prompts beside streams take what is simulated.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.clusters.roles import SETTLED, scaled_rows
from benchmarks.clusters.roles import TRACES as ROLE_TRACES
from cli.load.results import Objectives, summarize
from cli.load.workload import PlannedRequest, PromptMaker, TraceRow, random_workload, read_trace, trace_workload
from cli.simulation.cluster import SimulatedCluster
from cli.simulation.settings import ClusterConfig
from cli.simulation.simulate import DEFAULT_VOCAB_SIZE
from cli.simulation.specs import spec_of

CLUSTERS = ("aggregated", "static", "adaptive")
TRACES = ROLE_TRACES | {"code": "AzureLLMInferenceTrace_code.csv", "synthetic": "synthetic_trace.jsonl"}
# KV of 16,000 tokens arrived 8.3 ms later from another H200 (docs/benchmarks.md "Hand-off from prefill to decode").
PULL_TOKENS_PER_SECOND = 2e6
OBJECTIVES = Objectives(ttft_ms=1000.0, itl_ms=25.0)
GAP_SECONDS = 10.0  # between replayed cells
LOOP_CLIENTS, LOOP_TOKENS = 256, (1024, 128)  # of a closed loop


@dataclass(frozen=True)
class Window:
    """The counted requests: those sent from `begin` to `end`, in seconds of the simulation."""

    begin: float
    end: float


@dataclass(frozen=True)
class Cell:
    """One cluster under one load."""

    load: str
    rate: float
    cluster: str
    tokens_per_second: float  # while requests arrive
    good_per_second: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    placements: dict[str, int]

    def __str__(self) -> str:
        times = "".join(f"{times[name]:8.1f}" for times in (self.ttft_ms, self.itl_ms) for name in ("mean", "p99"))
        placed = " ".join(f"{name} {count}" for name, count in sorted(self.placements.items()))
        return (
            f"{self.load:10} {self.rate:5g} {self.cluster:10} {self.tokens_per_second:7.0f} "
            f"{self.good_per_second:7.2f}{times}  {placed}"
        )


HEADER = f"{'load':10} {'req/s':>5} {'cluster':10} {'tok/s':>7} {'good/s':>7}    TTFT     p99     ITL p99, ms"


def settings_of(cluster: str, gpus: int = 2, **settings: Any) -> ClusterConfig:
    """Return a cluster of `gpus` GPUs, half of which prefill unless it is aggregated."""
    num_prefill = 0 if cluster == "aggregated" else gpus // 2
    if cluster == "adaptive":
        settings = {"ttft_objective_ms": OBJECTIVES.ttft_ms, "itl_objective_ms": OBJECTIVES.itl_ms, **settings}
    return ClusterConfig(
        prefill_workers=num_prefill, decode_workers=gpus - num_prefill,
        **{"pull_tokens_per_second": PULL_TOKENS_PER_SECOND, **settings},
    )  # fmt: skip


def measure(
    name: str, rate: float, cluster: str, requests: Iterable[PlannedRequest], windows: Sequence[Window],
    config: ClusterConfig, seed: int = 0,
) -> list[Cell]:  # fmt: skip
    """Run the requests, and summarize those of each window."""
    simulated = SimulatedCluster(spec_of(config), seed)
    simulated.run(requests)
    cells = []
    for window in windows:
        records = [record for record in simulated.records if window.begin <= record.sent < window.end]
        seconds = window.end - window.begin
        summary = summarize(records, seconds, OBJECTIVES)
        tokens = sum(window.begin <= t < window.end for r in simulated.records for t in r.chunk_times)
        cells.append(
            Cell(
                name,
                rate,
                cluster,
                tokens / seconds,
                summary["good_requests_per_second"],
                summary["ttft_ms"],
                summary["itl_ms"],
                simulated.num_decisions,
            )
        )
    return cells


def cells_of(
    name: str, rows: Sequence[TraceRow], rate: float, seconds: float, warm: float, seed: int = 0, **settings: Any
) -> list[Cell]:
    """Run the clusters under the same requests. rows: of a trace, from the first one to send."""
    chosen = scaled_rows(rows, rate, seconds + warm, longest=0)
    maker, window = PromptMaker(DEFAULT_VOCAB_SIZE), Window(warm, seconds + warm)
    return [
        cell
        for cluster in CLUSTERS
        for cell in measure(
            name,
            rate,
            cluster,
            trace_workload(maker, chosen, 1.0, 1.0, seed),
            [window],
            settings_of(cluster, **settings),
            seed,
        )
    ]


@dataclass(frozen=True)
class Comparison:
    """The adaptive cluster relative to others; `better` has the higher goodput of aggregated and static."""

    goodput: float  # relative to the better one
    throughput: float  # relative to aggregated
    ttft_p99: float  # relative to aggregated
    ttft_p99_of_better: float

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Comparison:
        aggregated, static, adaptive = cells
        better = max(aggregated, static, key=lambda cell: cell.good_per_second)
        return cls(
            adaptive.good_per_second / max(better.good_per_second, 1e-9),
            adaptive.tokens_per_second / aggregated.tokens_per_second,
            adaptive.ttft_ms["p99"] / aggregated.ttft_ms["p99"],
            adaptive.ttft_ms["p99"] / better.ttft_ms["p99"],
        )

    def __str__(self) -> str:
        return (
            f"  goodput {self.goodput:.2f}x the better's; tok/s {self.throughput:.3f}x aggregated's; "
            f"TTFT p99 {self.ttft_p99:.2f}x aggregated's, {self.ttft_p99_of_better:.2f}x the better's"
        )


def fitting(path: Path, longest: int) -> list[TraceRow]:
    return [row for row in read_trace(path) if row.num_input_tokens + row.num_output_tokens <= longest]


def replay_loop(cluster: str, cell: dict[str, Any], seconds: float) -> str:
    """Return a line that compares the closed loop of `benchmarks.clusters.roles` with a simulated one."""
    simulated = SimulatedCluster(spec_of(settings_of(cluster)))
    lengths = (LOOP_TOKENS[0],) * 2, (LOOP_TOKENS[1],) * 2
    planned = random_workload(PromptMaker(DEFAULT_VOCAB_SIZE), 1 << 13, *lengths, 0.0, seed=0)
    simulated.run_closed(planned, LOOP_CLIENTS, until=seconds)
    begin = SETTLED * seconds
    times = [t for record in simulated.records for t in record.chunk_times if begin <= t < seconds]
    found = summarize([r for r in simulated.records if begin <= r.sent < seconds], seconds, OBJECTIVES)
    rates = f"tok/s {cell['output_tokens_per_second']:.0f}; {len(times) / (seconds - begin):.0f}"
    pairs = ", ".join(f"TTFT {q} {cell['ttft_ms'][q]:.0f}; {found['ttft_ms'][q]:.0f}" for q in ("mean", "p50"))
    return f"closed {cluster}, measured; simulated: {rates}, {pairs}"


def replay(path: Path, traces: Path, longest: int) -> Iterator[str]:
    """Yield lines that compare cells of `benchmarks.clusters.roles` with the same cells in simulated time."""
    document = json.loads(path.read_text(encoding="utf-8"))
    seconds = float(document["argv"][document["argv"].index("--seconds") + 1])
    maker = PromptMaker(DEFAULT_VOCAB_SIZE)
    for cell in document["cells"]:
        if not cell["rate"]:
            yield replay_loop(cell["cluster"], cell, seconds)
    for cluster in ("aggregated", "static"):
        measured = [cell for cell in document["cells"] if cell["cluster"] == cluster and cell["rate"]]
        requests: list[PlannedRequest] = []
        windows: list[Window] = []
        for number, cell in enumerate(measured):
            begin = windows[-1].end + GAP_SECONDS if windows else 0.0
            windows.append(Window(begin, begin + seconds))
            rows = scaled_rows(fitting(traces / TRACES[cell["load"]], longest), cell["rate"], seconds, longest=0)
            planned = trace_workload(maker, rows, 1.0, 1.0, seed=number)  # prompts that no earlier cell had
            requests += [replace(each, at_seconds=each.at_seconds + begin) for each in planned]
        found = measure("", 0.0, cluster, requests, windows, settings_of(cluster))
        for cell, simulated in zip(measured, found, strict=True):
            pairs = ", ".join(
                f"{label} {quantile} {cell[name][quantile]:.1f}; {getattr(simulated, name)[quantile]:.1f}"
                for (name, label), quantile in itertools.product(
                    (("ttft_ms", "TTFT"), ("itl_ms", "ITL")), ("mean", "p50", "p99")
                )
            )
            yield f"{cell['load']} {cell['rate']:g}/s {cluster}, ms measured; simulated: {pairs}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Three clusters under traces, in simulated time.")
    parser.add_argument(
        "--loads", default="azure:10:20:40,mooncake:1:2:4", help=f"TRACE:RATE:... of {', '.join(TRACES)}"
    )
    parser.add_argument("--traces", type=Path, default=Path("/work/shared/traces"), help="directory of the traces")
    parser.add_argument("--measured", type=Path, help="replay what `benchmarks.clusters.roles --json` wrote, instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cell")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds before them that are not counted")
    parser.add_argument("--skip", type=int, default=0, help="rows of the trace before the first that is sent")
    parser.add_argument("--longest", type=int, default=30_000, help="leave out requests of more tokens")
    parser.add_argument("--mixed-ms", type=float, default=0.0, help="as of `mini-infer simulate`")
    parser.add_argument("--pull-tokens-per-second", type=float, default=PULL_TOKENS_PER_SECOND, help="the same")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write each cell there, a line each")
    options = parser.parse_args()
    if options.measured:
        for line in replay(options.measured, options.traces, options.longest):
            print(line, flush=True)
        return
    settings = {"mixed_ms": options.mixed_ms, "pull_tokens_per_second": options.pull_tokens_per_second}
    everything: list[Cell] = []
    print(HEADER, flush=True)
    for load in options.loads.split(","):
        name, *rates = load.split(":")
        rows = fitting(options.traces / TRACES[name], options.longest)[options.skip :]
        for rate in map(float, rates):
            cells = cells_of(name, rows, rate, options.seconds, options.warm, options.seed, **settings)
            everything += cells
            print(*cells, Comparison.of(cells), sep="\n", flush=True)
    if options.json:
        lines = [json.dumps(asdict(cell)) for cell in everything]
        options.json.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
