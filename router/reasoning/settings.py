"""Settings of reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from common.reasoning.reasoning_format import FORMATS


@dataclass(frozen=True)
class ReasoningSettings:
    reasoning_parser: str = setting(
        "auto",
        "how models write their reasoning; auto: as their chat template shows, none: it stays in the answer",
        choices=("auto", "none", *FORMATS),
    )
