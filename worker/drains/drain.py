"""Drain state of a worker: whether it accepts new requests, and when it may end. Pure; times are monotonic."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from common.errors import UnavailableError
from protos import types_pb2 as pb
from worker.front.sessions import Session

logger = logging.getLogger(__name__)
SETTLE_SECONDS = 2.0  # enough for routers to hear of a drain, if they can hear anything


class Drain:
    """A drain is started by an operator, who may undo it, or by the end of the process."""

    def __init__(self) -> None:
        self.is_active = False
        self.is_final = False  # the process ends, so the drain cannot be undone
        self.num_changes = 0  # orders reports and replies, which arrive independently
        self._began = 0.0
        self._deadline = 0.0

    def start(self, grace_seconds: float, now: float, is_final: bool = False) -> None:
        """Accept no more requests; the worker ends when the open ones have ended, or after `grace_seconds`."""
        if not self.is_final:
            self.is_active, self.is_final, self._deadline = True, is_final, now + grace_seconds
            self._began = now
            self.num_changes += 1
            logger.info("draining for at most %.0f s", grace_seconds)

    def undo(self) -> None:
        """Accept requests again. Raises UnavailableError if the worker is about to stop."""
        if self.is_final:
            raise UnavailableError("the worker is stopping")
        self.is_active = False
        self.num_changes += 1

    def is_over(self, sessions: Iterable[Session], is_idle: bool, now: float) -> bool:
        """Whether a draining worker has no request left and none on its way to it, or no time left for them.

        A request may be on its way from a router that does not know of the drain yet.
        """
        is_known = all(session.num_drain_changes == self.num_changes for session in sessions)
        has_settled = is_known or now >= self._began + SETTLE_SECONDS
        return self.is_active and ((is_idle and has_settled) or now >= self._deadline)

    def tell(self, load: pb.LoadReport) -> None:
        """Add the drain state to the load report for routers."""
        load.draining, load.num_drain_changes = self.is_active, self.num_changes
