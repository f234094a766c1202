"""Setting of `serve` for services that die."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class RestartSettings:
    exit_on_failure: bool = setting(
        False,
        "when a service dies, stop the others and exit with 1 (for a supervisor above); else start it again",
    )
