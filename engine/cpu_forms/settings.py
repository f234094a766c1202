"""The setting of answers that do not depend on what else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class FormSettings(EngineWing):
    batch_invariant: bool = setting(
        True, "on a CPU: equal answers whatever else is in the batch; larger batches are faster without"
    )
