"""The setting of the order of service."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class PolicySettings(EngineWing):
    scheduling_policy: str = setting(
        "priority", "who is served first, admitted, preempted: priority, fcfs, or your own module:Class"
    )
