"""Settings of limits on request bodies."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import require, setting


@dataclass(frozen=True)
class BodySettings:
    max_body_memory_mb: int = setting(128, "large request bodies that are being read, together; more get 429")

    def __post_init__(self) -> None:
        require(self.max_body_memory_mb >= 16, "--max-body-memory-mb must be at least 16, which is the largest body")
