"""`mini-infer plan`: how to divide GPUs between prefill and decode, by simulating each division under a load.

    mini-infer plan --trace conversation_trace.jsonl --gpus 4 --slo-ttft-ms 2000 --slo-itl-ms 50
    mini-infer plan --trace conversation_trace.jsonl --gpus 8 --model benchmarks/configs/llama3.3-70b --quant-mode fp8

Each worker is one GPU; with --model or --calibrations it may be several with tensor parallelism. The load is replayed
ever faster for each division, until too few requests meet the objectives.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.load.bench import ReportConfig, WorkloadConfig, write_json
from cli.load.results import Objectives
from cli.load.workload import parse_range, read_trace
from cli.simulation.calibration import calibrated, steps_of
from cli.simulation.divisions import DEGREES, Division, WorkerCosts, cluster_of, divisions
from cli.simulation.model_costs import GPUS, WEIGHT_BYTES, model_size, num_kv_blocks, step_cost
from cli.simulation.plan_report import Found, advice, described, draw, show
from cli.simulation.settings import ClusterConfig
from cli.simulation.simulate import simulated
from common.config import SettingsParser, add_arguments, from_namespace, require, setting
from common.errors import ConfigError

SHARP = 1.05  # the highest rate is found within 5%
LOWEST, HIGHEST = 1 / 64, 4096.0  # range of multiples of the load's own rate
MAX_REQUESTS = 400  # of a trace, by default


@dataclass(frozen=True)
class PlanConfig:
    """Find the division of GPUs that serves a load fastest within objectives, in simulated time."""

    gpus: int = setting(2, "GPUs; with --model or --calibrations a worker may have several")
    slo_ttft_ms: float = setting(1000.0, "a good request has its first token by then; 0: no objective")
    slo_itl_ms: float = setting(50.0, "and 99% of its gaps are below this; 0: no objective")
    share: float = setting(0.95, "share of requests that must be good")
    model: str = setting(
        "", "folder with the config.json of a model: what its steps take, by --gpu and number of ranks"
    )
    quant_mode: str = setting("none", "its weights", choices=tuple(WEIGHT_BYTES))
    gpu: str = setting("h200", "which GPUs", choices=tuple(GPUS))
    calibrations: str = setting(
        "", "what `simulate --like` or --against wrote of clusters with --tp: 1=FILE,2=FILE; goes before --model"
    )
    adaptive: bool = setting(False, "adaptive clusters, too; GPUs have not confirmed what is simulated of them")
    json: str = setting("", "write the result to this file; -: standard output")
    plot: str = setting("", "draw the requests that are good, over the load, into this file (.png, .svg, .pdf)")

    def __post_init__(self) -> None:
        require(self.gpus > 0, f"--gpus {self.gpus}: choose at least 1")
        require(0.0 < self.share <= 1.0, f"--share {self.share}: choose a share above 0, at most 1")
        ReportConfig(json=self.json, plot=self.plot)
        require(self.slo_ttft_ms > 0 or self.slo_itl_ms > 0, "give --slo-ttft-ms, --slo-itl-ms or both")


def highest(is_good: Callable[[float], bool]) -> float:
    """Return the highest good scale, within SHARP; 0: not even the lowest. Assumes that lower scales are better."""
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


def examine(
    division: Division, cluster: ClusterConfig, workload: WorkloadConfig, config: PlanConfig,
    costs: Mapping[int, WorkerCosts],
) -> Found:  # fmt: skip
    """Find the highest rate of a division."""
    objectives = Objectives(config.slo_ttft_ms, config.slo_itl_ms)
    made = dataclasses.replace(
        cluster_of(division, cluster, costs),
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
    curve = [(at, summary["good_fraction"]) for at, summary in sorted(summaries.items())]
    return Found(division, scale, summaries.get(scale, {}), curve)


def costs_of(config: PlanConfig, block_size: int, longest: int) -> tuple[dict[int, WorkerCosts], list[str]]:
    """Return workers' costs by number of ranks, and why some numbers are left out. No costs: all are as in --steps.

    longest: tokens of a request with its answer, which must fit. Raises ConfigError.
    """
    costs = read_calibrations(config.calibrations)
    reasons: list[str] = []
    if config.model:
        from engine.tensor_parallel.rank_config import can_be_divided  # imports torch, which --help avoids

        model, model_config = model_size(config.model, config.quant_mode)
        for ranks in (ranks for ranks in DEGREES if ranks <= config.gpus and ranks not in costs):
            num_blocks = num_kv_blocks(model, GPUS[config.gpu], ranks, block_size)
            if not can_be_divided(model_config, ranks):
                reasons.append(f"TP {ranks} cannot divide the model")
            elif num_blocks * block_size < longest:
                weights = model.weight_bytes / ranks / 1e9
                reasons.append(f"TP {ranks} does not fit: weights of {weights:.0f} GB a GPU leave no room for KV")
            else:
                costs[ranks] = WorkerCosts(steps_of(asdict(step_cost(model, GPUS[config.gpu], ranks))), num_blocks)
        require(bool(costs), f"--model {config.model} fits on no worker: {'; '.join(reasons)}")
    return costs, reasons


def read_calibrations(text: str) -> dict[int, WorkerCosts]:
    """Read `1=FILE,2=FILE`: results of `simulate --json` for workers with so many ranks. Raises ConfigError."""
    costs: dict[int, WorkerCosts] = {}
    for item in filter(None, text.split(",")):
        ranks, _, path = item.partition("=")
        try:
            cluster = json.loads(Path(path).read_text(encoding="utf-8"))["cluster"]
            costs[int(ranks)] = WorkerCosts(cluster["steps"], cluster["num_gpu_blocks"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"--calibrations {item!r}: not RANKS=FILE of what `simulate --json` writes") from error
    return costs


def longest_request(workload: WorkloadConfig) -> int:
    """Return the most tokens of a prompt with its answer."""
    if not workload.trace:
        ends = parse_range(workload.input_len, "--input-len")[1], parse_range(workload.output_len, "--output-len")[1]
        return sum(ends)
    rows = read_trace(Path(workload.trace), workload.max_requests, workload.duration * workload.trace_scale)
    return round(workload.length_scale * max(row.num_input_tokens + row.num_output_tokens for row in rows))


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer plan", description=PlanConfig.__doc__)
    for title, cls in (("plan", PlanConfig), ("workers", ClusterConfig), ("workload", WorkloadConfig)):
        add_arguments(parser.add_argument_group(title), cls)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command. Return 1 if no division meets the objectives."""
    namespace = build_parser().parse_args(argv)
    config = from_namespace(PlanConfig, namespace, {})
    cluster = calibrated(from_namespace(ClusterConfig, namespace, {}))
    workload = from_namespace(WorkloadConfig, namespace, {})
    if workload.trace and not (workload.max_requests or workload.duration):
        workload = dataclasses.replace(workload, max_requests=MAX_REQUESTS)
    if not (workload.trace or workload.request_rate):
        raise ConfigError("give a --trace, or a --request-rate")
    costs, reasons = costs_of(config, cluster.block_size, longest_request(workload))
    everything = divisions(config.gpus, config.adaptive, sorted(costs) or (1,))
    if not everything:
        raise ConfigError(
            f"--gpus {config.gpus}: workers of {', '.join(map(str, costs))} GPUs cannot use all of them"
        )
    console = Console(stderr=True)
    waiting = console.status(f"simulating {len(everything)} divisions of {config.gpus} GPUs")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool, waiting:
        work = partial(examine, cluster=cluster, workload=workload, config=config, costs=costs)
        found = sorted(pool.map(work, everything), key=lambda each: -each.rate)
    for reason in reasons:
        console.print(reason, highlight=False)
    show(found, console)
    workers = {ranks: dataclasses.asdict(each) for ranks, each in costs.items()}
    divided = [described(each) for each in found]
    write_json({"divisions": divided, "advice": advice(found), "workers": workers, "left_out": reasons}, config.json)
    if config.plot:
        draw(found, Path(config.plot))
    return 0 if found[0].scale else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
