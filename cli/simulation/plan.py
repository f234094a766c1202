"""`mini-infer plan`: how to divide GPUs between prompts and answers, by simulating each division under a load.

    mini-infer plan --trace conversation_trace.jsonl --gpus 4 --slo-ttft-ms 2000 --slo-itl-ms 50

Each worker is a GPU. For each division the load is replayed ever faster, until fewer requests than asked meet the
objectives.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.load.bench import WorkloadConfig, write_json
from cli.load.results import Objectives
from cli.simulation.calibration import calibrated
from cli.simulation.settings import ClusterConfig
from cli.simulation.simulate import simulated
from common.config import SettingsParser, add_arguments, from_namespace, require, setting
from common.errors import ConfigError

SHARP = 1.05  # the highest rate is known within 5%
LOWEST, HIGHEST = 1 / 64, 4096.0  # multiples of the load's own rate that are looked at
MAX_REQUESTS = 400  # of a trace, if nothing is said
PAYS = 1.05  # a division that is better by less is not worth its transfers


@dataclass(frozen=True)
class PlanConfig:
    """Find the division of GPUs that serves a load fastest within objectives, in simulated time."""

    gpus: int = setting(2, "GPUs, each of which is a worker")
    slo_ttft_ms: float = setting(1000.0, "a good request has its first token by then; 0: no objective")
    slo_itl_ms: float = setting(50.0, "and 99% of its gaps are below this; 0: no objective")
    share: float = setting(0.95, "share of requests that must be good")
    adaptive: bool = setting(False, "adaptive clusters, too; GPUs have not confirmed what is simulated of them")
    json: str = setting("", "write the result to this file; -: standard output")

    def __post_init__(self) -> None:
        require(self.gpus > 0, f"--gpus {self.gpus}: choose at least 1")
        require(0.0 < self.share <= 1.0, f"--share {self.share}: choose a share above 0, at most 1")
        require(self.slo_ttft_ms > 0 or self.slo_itl_ms > 0, "give --slo-ttft-ms, --slo-itl-ms or both")


@dataclass(frozen=True)
class Division:
    """kind: aggregated, static or adaptive. The name has the workers that prefill and those that decode."""

    kind: str
    num_prefill: int
    num_decode: int

    @property
    def name(self) -> str:
        if self.kind == "aggregated":
            return f"{self.num_decode} for both"
        return f"{self.num_prefill} + {self.num_decode}" + (" adaptive" if self.kind == "adaptive" else "")


@dataclass(frozen=True)
class Found:
    """The highest rate of a division, and what requests had there; rate 0: none is good enough."""

    division: Division
    scale: float  # multiple of the load's own rate
    summary: dict[str, Any]

    @property
    def rate(self) -> float:
        return float(self.summary["good_requests_per_second"]) if self.scale else 0.0


def divisions(num_gpus: int, adaptive: bool) -> list[Division]:
    """All divisions of GPUs into workers of one GPU."""
    kinds = ("static", "adaptive") if adaptive else ("static",)
    split = [Division(kind, count, num_gpus - count) for count in range(1, num_gpus) for kind in kinds]
    return [Division("aggregated", 0, num_gpus), *split]


def highest(is_good: Callable[[float], bool]) -> float:
    """The highest scale that is good, within SHARP; 0: not even the lowest. Good scales are below all others."""
    good, bad = 0.0, 0.0
    scale = 1.0
    while not (good and bad):
        if is_good(scale):
            good, scale = scale, 2 * scale
            if scale > HIGHEST:
                return good
        else:
            bad, scale = scale, scale / 2
            if scale < LOWEST:
                return 0.0
    while bad > SHARP * good:
        middle = (good * bad) ** 0.5
        if is_good(middle):
            good = middle
        else:
            bad = middle
    return good


def examine(division: Division, cluster: ClusterConfig, workload: WorkloadConfig, config: PlanConfig) -> Found:
    """Find the highest rate of a division."""
    objectives = Objectives(config.slo_ttft_ms, config.slo_itl_ms)
    made = dataclasses.replace(
        cluster, prefill_workers=division.num_prefill, decode_workers=division.num_decode,
        ttft_objective_ms=config.slo_ttft_ms if division.kind == "adaptive" else 0.0,
        itl_objective_ms=config.slo_itl_ms if division.kind == "adaptive" else 0.0,
    )  # fmt: skip
    summaries: dict[float, dict[str, Any]] = {}

    def is_good(scale: float) -> bool:
        load = dataclasses.replace(
            workload, trace_scale=scale * workload.trace_scale, request_rate=scale * workload.request_rate
        )
        summaries[scale] = simulated(made, load, objectives)
        return bool(summaries[scale]["good_fraction"] >= config.share)

    scale = highest(is_good)
    return Found(division, scale, summaries.get(scale, {}))


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer plan", description=PlanConfig.__doc__)
    for title, cls in (("plan", PlanConfig), ("workers", ClusterConfig), ("workload", WorkloadConfig)):
        add_arguments(parser.add_argument_group(title), cls)
    return parser


def run(argv: Sequence[str]) -> int:
    """The command. Exit code 1 when no division meets the objectives."""
    namespace = build_parser().parse_args(argv)
    config = from_namespace(PlanConfig, namespace, {})
    cluster = calibrated(from_namespace(ClusterConfig, namespace, {}))
    workload = from_namespace(WorkloadConfig, namespace, {})
    if workload.trace and not (workload.max_requests or workload.duration):
        workload = dataclasses.replace(workload, max_requests=MAX_REQUESTS)
    if not (workload.trace or workload.request_rate):
        raise ConfigError("give a --trace, or a --request-rate")
    everything = divisions(config.gpus, config.adaptive)
    waiting = Console(stderr=True).status(f"simulating {len(everything)} divisions of {config.gpus} GPUs")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool, waiting:
        work = partial(examine, cluster=cluster, workload=workload, config=config)
        found = sorted(pool.map(work, everything), key=lambda each: -each.rate)
    show(found, Console(stderr=True))
    write_json({"divisions": [described(each) for each in found], "advice": advice(found)}, config.json)
    return 0 if found[0].scale else 1


def described(found: Found) -> dict[str, Any]:
    return {
        "division": found.division.name, "kind": found.division.kind, "prefill_workers": found.division.num_prefill,
        "decode_workers": found.division.num_decode, "scale": found.scale, "good_requests_per_second": found.rate,
        "at_that_rate": found.summary,
    }  # fmt: skip


def show(found: Sequence[Found], console: Console) -> None:
    """The divisions, best first, with a bar each, and what to do."""
    table = Table("prefill + decode", "good/s", "", "TTFT p50 p99", "gaps p50 p99", "tok/s")
    for column in table.columns:
        column.no_wrap = True
    best = max(found[0].rate, 1e-9)
    for each in found:
        if not each.scale:
            table.add_row(each.division.name, "none")
            continue
        ttft, itl = each.summary["ttft_ms"], each.summary["itl_ms"] or {"p50": 0.0, "p99": 0.0}
        table.add_row(
            each.division.name, f"{each.rate:.2f}", "█" * max(round(12 * each.rate / best), 1),
            f"{ttft['p50']:.0f} {ttft['p99']:.0f} ms", f"{itl['p50']:.1f} {itl['p99']:.1f} ms",
            f"{each.summary['output_tokens_per_second']:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(advice(found), highlight=False, soft_wrap=True)


def advice(found: Sequence[Found]) -> str:
    """One sentence on the best division, and whether dividing pays."""
    best = found[0]
    if not best.scale:
        return "No division meets the objectives: loosen them, or take more or faster GPUs."
    together = next(each for each in found if each.division.kind == "aggregated")
    if best.rate < PAYS * together.rate:
        return f"Let all GPUs do both: {together.rate:.2f} good requests/s, and dividing them brings less than 5%."
    served = f"Divide them: {best.division.name} serves {best.rate:.2f} good requests/s"
    if not together.scale:
        return f"{served}, and GPUs that do both serve too few well."
    return f"{served}, {best.rate / together.rate:.2f} times the {together.rate:.2f} of GPUs that do both."


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
