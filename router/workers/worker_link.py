"""One worker, seen from the router: the legs that are open there, and the mirror of what it reports.

Pushes deltas and failures to the choices whose legs they are, KV events to the prefix index, steps to a meter.
Knows nothing of clients, text, policy or models, and of gRPC only the messages: `WorkerConnection` keeps the stream.
Whenever that ends, every open leg fails with WorkerLostError, so that its choice can go on elsewhere.
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
    """The choice, as the link sees it. No method may raise: the link carries everybody's legs."""

    def on_delta(self, leg: Leg, delta: pb.TokenDelta, now: float) -> None:
        """Take what one step of the worker gave the choice. With a finish reason it is the last delta."""

    def on_failure(self, error: MiniInferError) -> None:
        """Handle the end of the leg without a finish reason."""


@dataclass(slots=True, eq=False)
class Leg:
    """One worker's part of a choice: a prefill leg computes its prompt, a decode leg its tokens.

    Open from `WorkerLink.submit` to the worker's last delta or `WorkerLink.close`; has a listener that long.
    """

    leg_id: str
    link: WorkerLink
    listener: LegListener
    next_link: WorkerLink | None  # where the choice goes on after this leg: it counts as waiting there
    opened: float  # when
    num_offered_tokens: int = 0  # prompt tokens whose KV the next worker could prefetch while this one computed
    times: pb.RequestTimes | None = None  # what the worker measured until the first delta; None before it
    first_time: float = 0.0  # when the first delta came
    num_tokens_at_first: int = 0  # output tokens of the choice then


class Meter:
    """What is learned of the worker of a link as it serves: nothing. `router/costs` predicts with it."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link

    def submitted(self, leg: Leg, message: pb.Submit, num_new_tokens: int) -> None:
        """A leg has been opened. num_new_tokens: of its prompt, which are to be computed."""

    def began(self, leg: Leg, times: pb.RequestTimes) -> None:
        """A leg's first delta is here."""

    def ended(self, leg: Leg) -> None:
        """A leg is not open any more."""

    def stepped(self, load: pb.LoadReport) -> None:
        """The worker has run a step."""


class WorkerLink:
    """Open legs and mirror of the worker at `address`, which its connection tells `attached` and `lost`."""

    def __init__(self, role: str, address: str) -> None:
        self.role = self.listed_role = role  # what it is used for, which operators may change; whose service it has
        self.address = address
        self.info: pb.WorkerInfo | None = None  # set while the stream is open, as is `stream`
        self.load = pb.LoadReport()
        self.breaker = Breaker()
        self.refused = ""  # why the handshake failed
        self.is_serving = False
        self.is_draining = False
        self.is_leaving = False  # its address is not listed any more
        self.num_lost = 0  # times the stream ended
        self.lost_time = 0.0  # when the stream ended last; 0: never
        self.last_sign = 0.0  # when the last report or health reply came
        self.last_step = 0.0  # when a step was reported last
        self.stream: WorkerStream | None = None
        self._index: PrefixIndex
        self._on_usable: Callable[[], object]
        self._feed: IndexFeed | None = None
        self._legs: dict[str, Leg] = {}
        self.num_expected = 0  # choices that will come here when their leg elsewhere ends
        self.meter = Meter(self)
        self._num_drain_changes = 0  # of the worker, when `is_draining` became known

    def join(self, index: PrefixIndex, meter: Meter, on_usable: Callable[[], object]) -> None:
        """Feed these, and tell of its use, from now on: the worker serves another model than before."""
        self._index, self.meter, self._on_usable = index, meter, on_usable

    # -- what dispatch and policy use --------------------------------------------------------------------------

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.info.worker_id if self.info else self.address)

    @property
    def num_open(self) -> int:
        return len(self._legs)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait here: by the last report, which lacks what is on its way, and our own count."""
        load = self.load
        num_waiting = load.num_waiting + load.num_loading + load.num_swapped + self.num_expected
        return max(load.num_running, len(self._legs) - load.num_waiting) + num_waiting

    @property
    def is_usable(self) -> bool:
        return self.info is not None and self.is_serving and not self.is_draining and not self.is_leaving

    def state(self, now: float) -> str:
        """One word for operators."""
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
        """Open a leg here, with so many prompt tokens to compute. Raises WorkerLostError without an open stream."""
        if self.stream is None:
            raise WorkerLostError(f"worker {self.address} is not connected")
        leg = self._legs[message.request_id] = Leg(message.request_id, self, listener, next_link, time.monotonic())
        self.meter.submitted(leg, message, num_new_tokens)
        if next_link is not None:
            next_link.num_expected += 1
        self.stream.send(pb.Command(submit=message))
        return leg

    def close(self, leg: Leg) -> bool:
        """Forget the leg and tell the worker. False: the worker does not have it (any more)."""
        if leg.leg_id not in self._legs:
            return False
        self._forget(leg)
        if self.stream is None:
            return False
        self.stream.send(pb.Command(cancel=pb.Cancel(request_id=leg.leg_id)))
        return True

    def release(self, handle: pb.KvHandle) -> None:
        """Tell the worker that nobody will read this KV; without a connection its lease expires."""
        if self.info is not None and self.stream is not None and self.info.epoch == handle.epoch:
            self.stream.send(pb.Command(release=pb.Release(lease_id=handle.lease_id, epoch=handle.epoch)))

    def learn_drain(self, is_draining: bool, num_changes: int) -> None:
        """Take what a reply or report says, unless the worker said it before what is known already."""
        if num_changes < self._num_drain_changes:
            return
        if is_draining and num_changes != self._num_drain_changes and self.stream is not None:
            self.stream.send(pb.Command(drain_noted=pb.DrainNoted(num_drain_changes=num_changes)))
        self.is_draining, self._num_drain_changes = is_draining, num_changes

    # -- what the connection calls -----------------------------------------------------------------------------

    def attached(self, info: pb.WorkerInfo, stream: WorkerStream) -> None:
        """The stream is open: requests may come."""
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
        """The stream has ended: forget the worker's state and fail what is open here."""
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
        while self._legs:  # one that fails may close others
            leg = next(iter(self._legs.values()))
            self._forget(leg)
            leg.listener.on_failure(error)

    def apply(self, report: pb.StepReport) -> None:
        """Take one step of the worker. The hot path: once per step for all legs here."""
        now = self.last_sign = time.monotonic()
        if report.HasField("load"):
            load = report.load
            if load.num_steps != self.load.num_steps:  # else the worker tells of the same step again
                self.last_step = now
                self.meter.stepped(load)
            self.load = load
            self.learn_drain(load.draining, load.num_drain_changes)
        for offer in report.kv_offers:
            self._pass_on(offer)
        legs = self._legs
        for delta in report.deltas:
            leg = legs.get(delta.request_id)
            if leg is None:  # closed while the step ran there
                if delta.HasField("kv_handle"):
                    self.release(delta.kv_handle)
                continue
            if leg.times is None:
                self._first_delta(leg, delta)
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
        """Let the worker where the choice goes on prefetch a part of the prompt, which is still computed here."""
        leg = self._legs.get(offer.request_id)  # None: closed while the step ran there
        target = None if leg is None else leg.next_link
        if leg is None or target is None or target.stream is None or target.is_draining:
            self.release(offer.kv_handle)
        else:
            target.stream.send(pb.Command(prefetch=offer))
            leg.num_offered_tokens += offer.kv_handle.num_tokens

    def _first_delta(self, leg: Leg, delta: pb.TokenDelta) -> None:
        leg.times = delta.times
        self.meter.began(leg, delta.times)
        self.breaker.record_success()

    def _forget(self, leg: Leg) -> None:
        """Drop the leg: nothing that arrives later reaches its choice."""
        del self._legs[leg.leg_id]
        self.meter.ended(leg)
        if leg.next_link is not None:
            leg.next_link.num_expected -= 1
