"""Settings of an engine's own host tier."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_not_negative, setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class HostTierSettings(EngineWing):
    host_tier_gb: float = setting(0.0, "host memory for evicted and swapped blocks, without a node agent")
    preemption: str = setting("recompute", "how preempted requests get their KV back", choices=("recompute", "swap"))

    def __post_init__(self) -> None:
        check_not_negative(self, "host_tier_gb")
