"""Settings of how long a worker may be silent."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_positive, setting


@dataclass(frozen=True)
class SilenceSettings:
    worker_timeout_seconds: float = setting(4.0, "a worker that says nothing for this long is out of service")

    def __post_init__(self) -> None:
        check_positive(self, "worker_timeout_seconds")
