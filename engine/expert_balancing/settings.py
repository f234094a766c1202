"""Settings of expert balancing."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Rules, require, setting
from engine.wings import EngineWing

NOT_IN_STAGES: Rules = {
    ("pp",): "--pp with --expert-load-file, --expert-placement or --expert-rebalance-interval is not supported yet"
}


@dataclass(frozen=True)
class ExpertBalancingSettings(EngineWing):
    expert_load_file: str = setting(
        "",
        "file that gets counts of the tokens that chose each expert, every 10 seconds and at the end; with `serve` "
        "one of each worker, its name after this one",
        per_worker=True,
        excludes=NOT_IN_STAGES,
    )
    expert_placement: str = setting(
        "",
        "such a file, by which --expert-parallel gives ranks experts so that they have as much work",
        excludes=NOT_IN_STAGES,
        needs={
            ("expert_parallel",): "--expert-placement is of ranks that have whole experts: give --expert-parallel"
        },
    )
    num_redundant_experts: int = setting(
        0,
        "experts of a layer beyond one of each, all ranks': replicas of the hottest, with --expert-placement or "
        "--expert-rebalance-interval",
        needs={
            ("expert_placement", "expert_rebalance_interval"): "--num-redundant-experts: which ones, "
            "--expert-placement or --expert-rebalance-interval says"
        },
    )
    expert_rebalance_interval: int = setting(
        0, "steps between looks at the loads of experts, after which ranks of --expert-parallel exchange experts if "
        "that divides the work better by a tenth; 0: they keep what they start with",
        excludes=NOT_IN_STAGES,
        needs={
            ("expert_parallel",): "--expert-rebalance-interval exchanges experts between ranks that have whole ones: "
            "give --expert-parallel"
        },
    )  # fmt: skip

    def __post_init__(self) -> None:
        require(
            self.expert_rebalance_interval >= 0,
            f"--expert-rebalance-interval {self.expert_rebalance_interval}: choose 1 or more, or 0 for never",
        )
