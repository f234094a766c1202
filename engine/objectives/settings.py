"""Settings of latency objectives in an engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_not_negative, setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class ObjectiveSettings(EngineWing):
    itl_objective_ms: float = setting(
        0.0,
        "time between tokens to keep: bounds the prompt tokens of a step that decodes, too; 0: none",
        excludes={
            ("pp",): "--pp with --itl-objective-ms is not supported yet: a stream's gap is a round of all stages, "
            "not a step"
        },
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "itl_objective_ms")
