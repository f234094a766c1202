"""One worker from the router's side: its open legs, and a mirror of the state that it reports.

Pushes deltas and failures to the choices of the legs, KV events to the prefix index, steps to a meter. Knows nothing
of clients, text, policy or models, and of gRPC only the messages: `WorkerConnection` keeps the stream. When the
stream ends, every open leg fails with WorkerLostError, so that its choice can continue elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.errors import MiniInferError
from kvstore.pool.index import PrefixIndex
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.workers.failures import Breaker, WorkerLostError, error_of
from router.workers.worker_stream import IndexFeed, WorkerStream

logger = logging.getLogger(__name__)


class LegListener(Protocol):
    """The interface of a choice for links. No method may raise: a link has the legs of many choices."""

    def on_delta(self, leg: Leg, delta: pb.TokenDelta, now: float) -> None:
        """Take the choice's delta of one worker step. One with a finish reason is the last."""

    def on_failure(self, error: MiniInferError) -> None:
        """Called when the leg has ended without a finish reason."""


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of a choice: a prefill leg computes its prompt, a decode leg its tokens.

    Open, with its listener called, from `WorkerLink.submit` to the worker's last delta or `WorkerLink.close`.
    """

    leg_id: str
    link: WorkerLink
    listener: LegListener
    next_link: WorkerLink | None  # worker of the next leg, where the choice already counts as waiting
    opened: float  # time
    num_offered_tokens: int = 0  # prompt tokens whose KV this worker offered to the next one for a prefetch
    times: pb.RequestTimes | None = None  # the worker's measurements until the first delta; None before it
    first_time: float = 0.0  # time of the first delta
    num_tokens_at_first: int = 0  # output tokens of the choice at first_time


class Meter:
    """Takes events of a link's worker and learns nothing. `router/costs` has one that learns to predict costs."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link

    def submitted(self, leg: Leg, message: pb.Submit, num_new_tokens: int) -> None:
        """Called when a leg has been opened. num_new_tokens: prompt tokens to compute."""

    def began(self, leg: Leg, times: pb.RequestTimes) -> None:
        """Called with a leg's first delta. times: the worker's measurements until then."""

    def ended(self, leg: Leg) -> None:
        """Called when a leg is not open any more."""

    def stepped(self, load: pb.LoadReport) -> None:
        """Called when the worker has run a step."""


class WorkerLink:
    """Open legs and mirror of the worker at `address`. Its connection calls `attached`, `apply` and `lost`."""

    def __init__(self, role: str, address: str) -> None:
        self.role = self.listed_role = role  # its use, which operators may change; the role of its service
        self.address = address
        self.info: pb.WorkerInfo | None = None  # set while the stream is open, as is `stream`
        self.load = pb.LoadReport()
        self.breaker = Breaker()
        self.refused = ""  # why the handshake failed
        self.is_serving = False
        self.is_draining = False
        self.is_leaving = False  # its address is no longer listed
        self.num_lost = 0  # how often the stream ended
        self.lost_time = 0.0  # time of the last end of the stream; 0: never
        self.last_sign = 0.0  # time of the last report or health reply
        self.last_step = 0.0  # time of the last report of a new step
        self.stream: WorkerStream | None = None
        self._index: PrefixIndex
        self._on_usable: Callable[[], object]
        self._feed: IndexFeed | None = None
        self._legs: dict[str, Leg] = {}
        self.num_expected = 0  # choices whose next leg, after an open one elsewhere, is here
        self.meter = Meter(self)
        self._num_drain_changes = 0  # the worker's count of changes at which `is_draining` was set

    def join(self, index: PrefixIndex, meter: Meter, on_usable: Callable[[], object]) -> None:
        """Use these from now on: the worker serves another model than before."""
        self._index, self.meter, self._on_usable = index, meter, on_usable

    # -- for dispatch and policy -------------------------------------------------------------------------------

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.info.worker_id if self.info else self.address)

    @property
    def num_open(self) -> int:
        return len(self._legs)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait here, from the last report, which misses those in transit, and our own count."""
        load = self.load
        num_waiting = load.num_waiting + load.num_loading + load.num_swapped + self.num_expected
        return max(load.num_running, len(self._legs) - load.num_waiting) + num_waiting

    @property
    def is_usable(self) -> bool:
        return self.info is not None and self.is_serving and not self.is_draining and not self.is_leaving

    def state(self, now: float) -> str:
        """Describe the worker's state in one word for operators."""
        if self.refused:
            return "refused"
        if self.info is None:
            return "connecting"
        if self.is_draining:
            return "draining"
        if not self.is_serving:
            return "not_serving"
        return "suspended" if self.breaker.is_open(now) else "ready"

    def submit(
        self, message: pb.Submit, num_new_tokens: int, listener: LegListener, next_link: WorkerLink | None = None
    ) -> Leg:
        """Open a leg. num_new_tokens: prompt tokens to compute. Raises WorkerLostError without an open stream."""
        if self.stream is None:
            raise WorkerLostError(f"worker {self.address} is not connected")
        leg = self._legs[message.request_id] = Leg(message.request_id, self, listener, next_link, time.monotonic())
        self.meter.submitted(leg, message, num_new_tokens)
        if next_link is not None:
            next_link.num_expected += 1
        self.stream.send(pb.Command(submit=message))
        return leg

    def close(self, leg: Leg) -> bool:
        """Forget the leg and cancel it on the worker. Returns False if the worker does not have it (any more)."""
        if leg.leg_id not in self._legs:
            return False
        self._forget(leg)
        if self.stream is None:
            return False
        self.stream.send(pb.Command(cancel=pb.Cancel(request_id=leg.leg_id)))
        return True

    def release(self, handle: pb.KvHandle) -> None:
        """Release the lease of this KV, which nobody will read; without a connection it expires."""
        if self.info is not None and self.stream is not None and self.info.epoch == handle.epoch:
            self.stream.send(pb.Command(release=pb.Release(lease_id=handle.lease_id, epoch=handle.epoch)))

    def learn_drain(self, is_draining: bool, num_changes: int) -> None:
        """Take the drain state of a reply or report unless a newer one is known. num_changes: the worker's count."""
        if num_changes < self._num_drain_changes:
            return
        if is_draining and num_changes != self._num_drain_changes and self.stream is not None:
            self.stream.send(pb.Command(drain_noted=pb.DrainNoted(num_drain_changes=num_changes)))
        self.is_draining, self._num_drain_changes = is_draining, num_changes

    # -- calls of the connection -------------------------------------------------------------------------------

    def attached(self, info: pb.WorkerInfo, stream: WorkerStream) -> None:
        """Take the open stream: from now on requests may come."""
        self.info, self.stream = info, stream
        self._feed = IndexFeed(self._index, self.worker_id, stream)
        self.last_sign = time.monotonic()
        logger.info("%s worker %s attached (%s)", self.role, info.worker_id, self.address)
        self.set_serving(True)

    def set_serving(self, is_serving: bool) -> None:
        """Record the worker's health status."""
        was_serving, self.is_serving = self.is_serving, is_serving
        if is_serving and not was_serving:
            self._on_usable()

    def lost(self, reason: str) -> None:
        """Forget the worker's state and fail all open legs: the stream has ended."""
        if self.info is None:
            return
        logger.warning("lost %s worker %s: %s (%d open legs)", self.role, self.worker_id, reason, self.num_open)
        error = WorkerLostError(f"the connection to worker {self.worker_id} was lost")
        if self._feed is not None:
            self._feed.close()
        self.num_lost += 1
        self.lost_time = time.monotonic()
        self.breaker.record_failure(self.lost_time)
        self.info, self.stream, self._feed, self.is_serving = None, None, None, False
        self.load = pb.LoadReport()
        self.is_draining, self._num_drain_changes = False, 0
        while self._legs:  # a leg that fails may close others
            leg = next(iter(self._legs.values()))
            self._forget(leg)
            leg.listener.on_failure(error)

    def apply(self, report: pb.StepReport) -> None:
        """Take the report of one worker step. The hot path: called once per step for all legs."""
        now = self.last_sign = time.monotonic()
        if report.HasField("load"):
            load = report.load
            if load.num_steps != self.load.num_steps:  # else it is another report of the same step
                self.last_step = now
                self.meter.stepped(load)
            self.load = load
            self.learn_drain(load.draining, load.num_drain_changes)
        for offer in report.kv_offers:
            self._pass_on(offer)
        legs = self._legs
        for delta in report.deltas:
            leg = legs.get(delta.request_id)
            if leg is None:  # closed while the step ran
                if delta.HasField("kv_handle"):
                    self.release(delta.kv_handle)
                continue
            if leg.times is None:
                leg.times = delta.times
                self.meter.began(leg, delta.times)
                self.breaker.record_success()
            if delta.finish_reason:
                self._forget(leg)
            leg.listener.on_delta(leg, delta, now)
        for failure in report.failures:
            leg = legs.get(failure.request_id)
            if leg is not None:
                if failure.code == pb.FAILURE_CODE_UNAVAILABLE:
                    self.breaker.record_failure(now)
                self._forget(leg)
                leg.listener.on_failure(error_of(failure))
        if report.kv_events and self._feed is not None:
            self._feed.apply(report.kv_events)

    def _pass_on(self, offer: pb.KvOffer) -> None:
        """Offer KV of a prompt that is still computed here to the worker of the next leg for a prefetch."""
        leg = self._legs.get(offer.request_id)  # None: closed while the step ran
        target = None if leg is None else leg.next_link
        if leg is None or target is None or target.stream is None or target.is_draining:
            self.release(offer.kv_handle)
        else:
            target.stream.send(pb.Command(prefetch=offer))
            leg.num_offered_tokens += offer.kv_handle.num_tokens

    def _forget(self, leg: Leg) -> None:
        """Drop the leg: later messages do not reach its choice."""
        del self._legs[leg.leg_id]
        self.meter.ended(leg)
        if leg.next_link is not None:
            leg.next_link.num_expected -= 1
