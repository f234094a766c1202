"""The order of service by a policy that may fail: a user's code must not stop the engine."""

from __future__ import annotations

import logging
import math

from engine.kv.manager import KVManager
from engine.priorities.order import PriorityOrder
from engine.request import Request
from engine.scheduling.order import Rank, ServiceOrder
from engine.scheduling.policy import PolicyOrder, SchedulingPolicy
from engine.scheduling.request_queues import RequestQueues

logger = logging.getLogger(__name__)


class GuardedOrder(PriorityOrder):
    """The failure of its policy is logged once and has no other effect.

    After the first exception, or answer that is none, the policy is not asked any more: requests rank as with
    `priority`, and nobody gives way to a newcomer until all have been ranked anew.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._name = type(policy).__name__
        self._order: ServiceOrder = PolicyOrder(policy)
        self._has_failed = False

    def take_change(self) -> bool:
        has_failed, self._has_failed = self._has_failed, False
        if has_failed:
            self._order = PriorityOrder()
        return has_failed

    def rank(self, request: Request) -> Rank:
        if not self._has_failed:
            try:
                return checked_key(self._order.rank(request))
            except Exception:  # noqa: BLE001 - a user's code: whatever it raises, the engine goes on
                self._give_up()
        return super().rank(request)

    def admits(self, request: Request, queues: RequestQueues, kv: KVManager) -> bool:
        if not self._has_failed:
            try:
                return bool(self._order.admits(request, queues, kv))
            except Exception:  # noqa: BLE001 - as above
                self._give_up()
        return True

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        if not self._has_failed:
            try:
                return bool(self._order.gives_way(other, newcomer))
            except Exception:  # noqa: BLE001 - as above
                self._give_up()
        return False

    def _give_up(self) -> None:
        """Log the exception being handled and fall back to the default order."""
        self._has_failed = True
        logger.exception("scheduling policy %s failed; the engine goes on with the policy 'priority'", self._name)


def checked_key(key: object) -> Rank:
    """`key` if it can be sorted with others. Raises TypeError."""
    if isinstance(key, tuple) and all(isinstance(part, int | float) and not math.isnan(part) for part in key):
        return key
    raise TypeError(f"key must return a tuple of numbers, not {key!r}")
