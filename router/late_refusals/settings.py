"""Settings of early refusals of requests that would wait too long."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_positive, setting


@dataclass(frozen=True)
class LateRefusalSettings:
    max_wait_seconds: float = setting(60.0, "a request whose wait is predicted to be longer gets 429 at once")

    def __post_init__(self) -> None:
        check_positive(self, "max_wait_seconds")
