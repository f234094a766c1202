"""Settings of how long an engine may make no progress."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_positive, setting


@dataclass(frozen=True)
class HangSettings:
    stall_seconds: float = setting(
        4.0, "out of service when the engine makes no progress for this long; waiting for a core does not count"
    )
    start_stall_seconds: float = setting(
        120.0, "end when the engine does nothing for this long while it loads; a slow start may take any time"
    )

    def __post_init__(self) -> None:
        check_positive(self, "stall_seconds", "start_stall_seconds")
