"""Settings of expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import require, setting
from engine.wings import EngineWing

EXCHANGES = ("sum", "dispatch")


@dataclass(frozen=True)
class ExpertParallelSettings(EngineWing):
    expert_parallel: bool = setting(
        False,
        "ranks of --tp have whole experts instead of a part of each",
        flags=("--enable-expert-parallel",),
        needs={("tp",): "--expert-parallel divides experts among ranks: give --tp"},
    )
    expert_exchange: str = setting(
        "sum", "between ranks of --expert-parallel; sum: all have every token and add up what their experts make of "
        "it; dispatch: tokens are divided, and go to the ranks that have their experts",
        choices=EXCHANGES,
        excludes={("pp",): "--expert-exchange dispatch divides tokens among ranks, and a stage of --pp passes all of "
                  "them on: use --expert-exchange sum, or leave --pp out"},
        needs={("expert_parallel",): "--expert-exchange dispatch is between ranks that have whole experts: give "
               "--expert-parallel"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        require(
            self.expert_exchange in EXCHANGES,
            f"--expert-exchange {self.expert_exchange}: choose {', '.join(EXCHANGES)}",
        )
