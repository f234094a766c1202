"""Settings of requests from pages of other origins."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.config import setting
from common.errors import ConfigError


@dataclass(frozen=True)
class CorsSettings:
    cors_origins: str = setting(
        "", "origins whose pages may ask from a browser, https://host separated by commas, or *; empty: none"
    )

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#*\s]+", origin):
                raise ConfigError(f"--cors-origins {origin!r}: expected scheme://host[:port], without a path, or *")

    @property
    def origins(self) -> list[str]:
        return [origin for part in self.cors_origins.split(",") if (origin := part.strip())]
