"""`mini-infer simulate`: simulates a cluster under a load, in simulated time on this machine.

    mini-infer simulate --trace conversation_trace.jsonl --prefill-workers 4 --decode-workers 8 \\
        --steps base=0.0043,row=3e-6,context=14e-9,prompt=5e-4,prompt_token=2e-5,prompt_context=9e-10,weights=0.003
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Sequence
from typing import Any

from cli.load.bench import DEFAULT_CONCURRENCY, ReportConfig, WorkloadConfig, plan, show, write_json
from cli.load.results import Objectives, summarize
from cli.simulation.calibration import calibrated
from cli.simulation.settings import AgainstConfig, ClusterConfig
from common.config import SettingsParser, add_arguments, from_namespace

DEFAULT_VOCAB_SIZE = 50_000  # of random prompts


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer simulate", description=ClusterConfig.__doc__)
    for title, cls in (
        ("cluster", ClusterConfig), ("workload", WorkloadConfig), ("report", ReportConfig),
        ("comparison", AgainstConfig),
    ):  # fmt: skip
        add_arguments(parser.add_argument_group(title), cls)
    return parser


def simulated(config: ClusterConfig, workload: WorkloadConfig, objectives: Objectives) -> dict[str, Any]:
    """Simulate the load; return the summary as for `bench`, and the numbers of placements."""
    from cli.simulation.cluster import SimulatedCluster  # imports torch, which --help avoids
    from cli.simulation.specs import spec_of

    began = time.perf_counter()
    _, requests = plan(dataclasses.replace(workload, vocab_size=workload.vocab_size or DEFAULT_VOCAB_SIZE))
    cluster = SimulatedCluster(spec_of(config), workload.seed)
    gc.freeze()  # imported objects stay, so the garbage collector need not traverse them again
    if workload.is_closed:
        cluster.run_closed(requests, workload.concurrency or DEFAULT_CONCURRENCY, workload.duration or math.inf)
    else:
        cluster.run(requests)
    records = cluster.records
    begin = min((record.sent for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    return {
        "cluster": dataclasses.asdict(config), "workload": dataclasses.asdict(workload),
        "placements": cluster.num_decisions, "wall_seconds": time.perf_counter() - began,
    } | summarize(records, duration, objectives)  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    namespace = build_parser().parse_args(argv)
    config = from_namespace(ClusterConfig, namespace, {})
    workload = from_namespace(WorkloadConfig, namespace, {})
    report = from_namespace(ReportConfig, namespace, {})
    if url := from_namespace(AgainstConfig, namespace, {}).against:
        from cli.simulation.against import against  # imports torch, too

        write_json(against(url, config, workload), report.json)
        return 0
    summary = simulated(calibrated(config), workload, Objectives(report.slo_ttft_ms, report.slo_itl_ms))
    show(summary)
    write_json(summary, report.json)
    return 0
