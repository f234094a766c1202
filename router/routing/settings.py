"""Settings of the routing policy."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from router.routing.policy import POLICIES


@dataclass(frozen=True)
class RoutingSettings:
    policy: str = setting("cost", "how workers are chosen", choices=tuple(POLICIES))
