"""`mini-infer simulate`: what a cluster would do with a load, in simulated time on this machine.

    mini-infer simulate --trace conversation_trace.jsonl --prefill-workers 4 --decode-workers 8 \\
        --steps base=0.0043,row=3e-6,context=14e-9,prompt=5e-4,prompt_token=21.5e-6,prompt_context=0.9e-9
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.load.bench import ReportConfig, WorkloadConfig, plan, show, write_json
from cli.load.results import Objectives, summarize
from common.config import SettingsParser, add_arguments, check_not_negative, from_namespace, require, setting
from common.step_times import StepCost
from router.routing import objectives as routing
from router.routing.policy import POLICIES

if TYPE_CHECKING:
    from cli.simulation.cluster import ClusterSpec

DEFAULT_VOCAB_SIZE = 50_000  # that prompts are drawn from
# About an H200 with 7B parameters in bfloat16, see docs/benchmarks.md "In simulated time".
H200_7B = "base=0.0043,row=3e-6,context=14e-9,prompt=0.0005,prompt_token=21.5e-6,prompt_context=0.9e-9"


@dataclass(frozen=True)
class ClusterConfig:
    """Simulate a cluster under a load: the router's policy and the engine's scheduler, with steps of a cost model."""

    decode_workers: int = setting(1, "workers that decode; without --prefill-workers they compute prompts, too")
    prefill_workers: int = setting(0, "workers that compute prompts")
    steps: str = setting(H200_7B, "seconds of a step's parts; default: about an H200 with 7B parameters in bfloat16")
    num_gpu_blocks: int = setting(24_000, "KV blocks of a worker")
    block_size: int = setting(64, "tokens per KV block")
    max_num_seqs: int = setting(256, "sequences in one step")
    max_num_batched_tokens: int = setting(8192, "tokens in one step")
    policy: str = setting("cost", "the router's policy", choices=tuple(POLICIES))
    local_prefill_tokens: int = setting(64, "prompts up to this length are computed where they are decoded")
    ttft_objective_ms: float = setting(0.0, "placements keep first tokens below this; 0: no objective")
    itl_objective_ms: float = setting(0.0, "placements and prompt chunks keep gaps below this; 0: no objective")
    hop_ms: float = setting(0.5, "a message between client, router and worker")
    pull_ms: float = setting(1.0, "a pull of KV until its first byte")
    pull_tokens_per_second: float = setting(200_000.0, "tokens whose KV a worker pulls in a second")

    def __post_init__(self) -> None:
        check_not_negative(
            self,
            "prefill_workers",
            "local_prefill_tokens",
            "ttft_objective_ms",
            "itl_objective_ms",
            "hop_ms",
            "pull_ms",
        )
        for name in ("decode_workers", "num_gpu_blocks", "block_size", "max_num_seqs", "pull_tokens_per_second"):
            require(getattr(self, name) > 0, f"--{name.replace('_', '-')} must be positive")
        require(self.max_num_batched_tokens >= self.max_num_seqs, "--max-num-batched-tokens is below --max-num-seqs")
        StepCost.parse(self.steps)


def build_parser() -> SettingsParser:
    parser = SettingsParser(prog="mini-infer simulate", description=ClusterConfig.__doc__)
    for title, cls in (("cluster", ClusterConfig), ("workload", WorkloadConfig), ("report", ReportConfig)):
        add_arguments(parser.add_argument_group(title), cls)
    return parser


def spec_of(config: ClusterConfig) -> ClusterSpec:
    from cli.simulation.cluster import ClusterSpec  # torch, which --help does without
    from cli.simulation.worker import WorkerSpec

    worker = WorkerSpec(
        StepCost.parse(config.steps), config.num_gpu_blocks, config.block_size, config.max_num_seqs,
        config.max_num_batched_tokens, config.itl_objective_ms / 1e3,
    )  # fmt: skip
    return ClusterSpec(
        worker, config.prefill_workers, config.decode_workers, config.policy, config.local_prefill_tokens,
        routing.Objectives(ttft=config.ttft_objective_ms / 1e3, itl=config.itl_objective_ms / 1e3),
        config.hop_ms / 1e3, config.pull_ms / 1e3, config.pull_tokens_per_second,
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
    summary = simulated(config, workload, Objectives(report.slo_ttft_ms, report.slo_itl_ms))
    show(summary)
    write_json(summary, report.json)
    return 0
