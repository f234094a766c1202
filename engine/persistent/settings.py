"""Settings of the persistent kernel."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class PersistentSettings(EngineWing):
    persistent_kernel: bool = setting(
        True, "on a Hopper: one kernel for all layers in steps of one row, where it takes the model"
    )
