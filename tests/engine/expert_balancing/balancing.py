"""Access to the objects that count and move the experts of an engine."""

from __future__ import annotations

from engine.assembly import EngineParts
from engine.expert_balancing.rebalancing import Balancing


def balancing_of(parts: EngineParts) -> Balancing:
    [found] = [each for each in parts.engine.counting if isinstance(each, Balancing)]
    return found
