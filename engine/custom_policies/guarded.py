"""The order of service by a policy that may fail: a user's code must not stop the engine."""

from __future__ import annotations

import logging
import math

from engine.request import Request
from engine.scheduling.policy import EngineView, PriorityPolicy, Rank, SchedulingPolicy, ServiceOrder

logger = logging.getLogger(__name__)


class GuardedOrder(ServiceOrder):
    """The failure of its policy is logged once and has no other effect.

    After the first exception, or answer that is none, the policy is not asked any more: requests rank as with
    `PriorityPolicy`, and nobody gives way to a newcomer until all have been ranked anew.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        super().__init__(policy)
        self._has_failed = False

    def take_change(self) -> bool:
        has_failed, self._has_failed = self._has_failed, False
        if has_failed:
            self._policy = PriorityPolicy()
        return has_failed

    def rank(self, request: Request) -> Rank:
        if not self._has_failed:
            try:
                return checked_key(super().rank(request))
            except Exception:  # noqa: BLE001 - a user's code: whatever it raises, the engine goes on
                self._give_up()
        return ServiceOrder(PriorityPolicy()).rank(request)

    def admits(self, request: Request, engine: EngineView) -> bool:
        if not self._has_failed:
            try:
                return bool(super().admits(request, engine))
            except Exception:  # noqa: BLE001 - as above
                self._give_up()
        return True

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        if not self._has_failed:
            try:
                return bool(super().gives_way(other, newcomer))
            except Exception:  # noqa: BLE001 - as above
                self._give_up()
        return False

    def _give_up(self) -> None:
        """Log the exception being handled and fall back to the default policy."""
        self._has_failed = True
        name = type(self._policy).__name__
        logger.exception("scheduling policy %s failed; the engine goes on with the policy 'priority'", name)


def checked_key(key: object) -> Rank:
    """`key` if it can be sorted with others. Raises TypeError."""
    if isinstance(key, tuple) and all(isinstance(part, int | float) and not math.isnan(part) for part in key):
        return key
    raise TypeError(f"key must return a tuple of numbers, not {key!r}")
