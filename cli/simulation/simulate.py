"""`mini-infer simulate`: what a cluster would do with a load, in simulated time on this machine.

    mini-infer simulate --trace conversation_trace.jsonl --prefill-workers 4 --decode-workers 8 \\
        --steps base=0.0043,row=3e-6,context=14e-9,prompt=5e-4,prompt_token=21.5e-6,prompt_context=0.9e-9
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cli.load.bench import ReportConfig, WorkloadConfig, plan, show, write_json
from cli.load.results import Objectives, summarize
from cli.simulation.calibration import calibrated
from cli.simulation.settings import ClusterConfig
from common.config import SettingsParser, add_arguments, from_namespace, require
from common.step_times import StepCost
from router.routing import objectives as routing

if TYPE_CHECKING:
    from cli.simulation.cluster import ClusterSpec

DEFAULT_VOCAB_SIZE = 50_000  # that prompts are drawn from


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer simulate", description=ClusterConfig.__doc__)
    for title, cls in (
        ("cluster", ClusterConfig), ("workload", WorkloadConfig), ("report", ReportConfig),
    ):  # fmt: skip
        add_arguments(parser.add_argument_group(title), cls)
    return parser


def spec_of(config: ClusterConfig) -> ClusterSpec:
    from cli.simulation.cluster import ClusterSpec  # torch, which --help does without
    from cli.simulation.worker import WorkerSpec

    worker = WorkerSpec(
        StepCost.parse(config.steps), config.num_gpu_blocks, config.block_size, config.max_num_seqs,
        config.max_num_batched_tokens, config.itl_objective_ms / 1e3, config.mixed_ms / 1e3, config.turn_ms / 1e3,
        config.pull_ms / 1e3,
    )  # fmt: skip
    prefill = dataclasses.replace(
        worker, cost=StepCost.parse(config.prefill_steps or config.steps),
        num_blocks=config.prefill_num_gpu_blocks or config.num_gpu_blocks,
    )  # fmt: skip
    return ClusterSpec(
        worker, prefill, config.prefill_workers, config.decode_workers, config.policy, config.local_prefill_tokens,
        routing.Objectives(ttft=config.ttft_objective_ms / 1e3, itl=config.itl_objective_ms / 1e3),
        config.hop_ms / 1e3, config.accept_ms / 1e3, config.pull_tokens_per_second,
    )  # fmt: skip


def simulated(config: ClusterConfig, workload: WorkloadConfig, objectives: Objectives) -> dict[str, Any]:
    """What requests had: the summary of `bench`, and how they were placed."""
    from cli.simulation.cluster import SimulatedCluster  # see spec_of

    began = time.perf_counter()
    _, requests = plan(dataclasses.replace(workload, vocab_size=workload.vocab_size or DEFAULT_VOCAB_SIZE))
    cluster = SimulatedCluster(spec_of(config), workload.seed)
    cluster.run(requests)
    records = cluster.records
    begin = min((record.sent for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    return {
        "cluster": dataclasses.asdict(config), "workload": dataclasses.asdict(workload),
        "placements": cluster.num_decisions, "wall_seconds": time.perf_counter() - began,
    } | summarize(records, duration, objectives)  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """The command."""
    namespace = build_parser().parse_args(argv)
    config = from_namespace(ClusterConfig, namespace, {})
    workload = from_namespace(WorkloadConfig, namespace, {})
    report = from_namespace(ReportConfig, namespace, {})
    require(bool(workload.trace or workload.request_rate), "give a --trace, or a --request-rate")
    summary = simulated(calibrated(config), workload, Objectives(report.slo_ttft_ms, report.slo_itl_ms))
    show(summary)
    write_json(summary, report.json)
    return 0
