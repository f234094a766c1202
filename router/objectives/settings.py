"""Settings of latency objectives in a router."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_not_negative, setting
from router.objectives.objectives import Objectives


@dataclass(frozen=True)
class ObjectiveSettings:
    ttft_objective_ms: float = setting(
        0.0, "time to first token to keep: with this or --itl-objective-ms any worker may compute and decode; 0: none"
    )
    itl_objective_ms: float = setting(
        0.0, "time between tokens to keep; bounds the prompt chunks of steps with decode rows; 0: none"
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "ttft_objective_ms", "itl_objective_ms")

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.ttft_objective_ms / 1e3, self.itl_objective_ms / 1e3)
