"""The setting that asks for random weights."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class DummySettings(EngineWing):
    load_format: str = setting(
        "auto", "dummy: random weights from the model's config.json", choices=("auto", "dummy")
    )
