"""One worker, seen from the router: the requests that are open there, and the mirror of what it reports.

Delivers deltas and failures to the mailboxes of open attempts, KV events to the prefix index, load to its own
view. Knows nothing of clients, text or policy, and of gRPC only the messages: `WorkerConnection` keeps the stream.
Whenever that ends, every open attempt fails with WorkerLostError, so that `dispatch` can move it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from common.errors import DeadlineExceededError, UnavailableError
from kvstore.pool.index import PrefixIndex
from kvstore.types import BlockKey, WorkerId
from protos import types_pb2 as pb
from router.cluster.breaker import Breaker
from router.cluster.failures import WorkerLostError, error_of
from router.cluster.mailbox import Mailbox
from router.cluster.policy import WorkerView
from router.cluster.rates import WorkerRates

logger = logging.getLogger(__name__)
KV_BOUND_SHARE = 0.9  # of the KV blocks in use, and requests wait: it runs as many as it can


class Connection(Protocol):
    """What the link asks of the open connection."""

    def send(self, command: pb.Command) -> None:
        """Queue for the stream, in order."""
        ...

    async def fetch_snapshot(self) -> Sequence[pb.KvEvent]:
        """KV events of a fresh stream, the first of them a snapshot; none when the worker does not answer."""
        ...

    async def drain(self, grace_seconds: float) -> int:
        """Ask the worker to take no more requests and end; how many it still has. Raises UnavailableError."""
        ...

    async def undrain(self) -> None:
        """Ask a draining worker to take requests again. Raises UnavailableError."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One submission to one worker, open until `close`."""

    attempt_id: str
    link: WorkerLink
    mailbox: Mailbox
    num_prompt_tokens: int
    pending_tokens: int  # prompt tokens reserved on the worker until its first delta
    timer: asyncio.TimerHandle
    times: pb.RequestTimes | None = None
    is_over: bool = False  # the worker has said its last word on it

    def close(self) -> None:
        """Forget the attempt and tell the worker, unless it has ended there. KV that nobody took is released."""
        self.timer.cancel()
        self.link.forget(self)
        for delta in self.mailbox.close():
            if delta.HasField("kv_handle"):
                self.link.release(delta.kv_handle)


class WorkerLink:
    """Open requests and mirror of the worker at `address`, which its connection tells `attached` and `lost`."""

    def __init__(
        self, role: str, address: str, index: PrefixIndex, on_usable: Callable[[], None] = lambda: None
    ) -> None:
        """`on_usable` is called when requests may come that could not before."""
        self.role = role
        self.address = address
        self.info: pb.WorkerInfo | None = None  # set while the stream is open, as is `_connection`
        self.load = pb.LoadReport()
        self.rates = WorkerRates()
        self.breaker = Breaker()
        self.refused = ""  # why the handshake failed
        self.is_serving = False
        self.is_leaving = False  # its address is not listed any more
        self.num_lost = 0  # times the stream ended
        self.lost_time = 0.0  # when the stream ended last; 0: never
        self.last_sign = 0.0  # of life: a report, or an answer about its health
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._open: dict[str, Attempt] = {}
        self._pending_tokens = 0
        self._num_reserved = 0  # requests that will come here when their prompt is computed elsewhere
        self._on_usable = on_usable
        self._resync: asyncio.Task[None] | None = None

    # -- what dispatch and policy use --------------------------------------------------------------------------

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.info.worker_id if self.info else self.address)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_usable(self) -> bool:
        return self.info is not None and self.is_serving and not self.load.draining and not self.is_leaving

    def view(self) -> WorkerView:
        load = self.load
        used = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_cached
        kv_used_share = used / load.kv_blocks_total if load.kv_blocks_total else 0.0
        max_num_seqs = self.info.max_num_seqs if self.info else 1
        is_kv_bound = kv_used_share > KV_BOUND_SHARE and load.num_waiting + load.num_swapped > 0
        return WorkerView(
            worker_id=self.worker_id,
            num_running=max(load.num_running, len(self._open) - load.num_waiting),
            num_waiting=load.num_waiting + load.num_loading + load.num_swapped + self._num_reserved,
            queued_prefill_tokens=max(load.waiting_prefill_tokens, self._pending_tokens),
            prefill_tokens_per_second=self.rates.prefill_tokens_per_second,
            pull_tokens_per_second=self.rates.pull_tokens_per_second,
            step_seconds=self.rates.step_seconds,
            token_seconds=self.rates.token_seconds,
            kv_used_share=kv_used_share,
            max_num_seqs=max_num_seqs,
            num_slots=min(max(load.num_running, 1), max_num_seqs) if is_kv_bound else max_num_seqs,
        )

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Count a request that is going to be submitted here when its prompt is computed elsewhere."""
        self._num_reserved += 1
        try:
            yield
        finally:
            self._num_reserved -= 1

    def open(self, submit: pb.Submit, pending_tokens: int, deadline: float) -> Attempt:
        """Submit to the worker. Raises WorkerLostError when the stream is not open."""
        if self._connection is None:
            raise WorkerLostError(f"worker {self.address} is not connected")
        mailbox = Mailbox()
        too_late = DeadlineExceededError("the request took longer than it was given")
        timer = self._loop.call_later(deadline - time.monotonic(), mailbox.fail, too_late)
        attempt = Attempt(submit.request_id, self, mailbox, len(submit.prompt_token_ids), pending_tokens, timer)
        self._open[attempt.attempt_id] = attempt
        self._pending_tokens += pending_tokens
        self._connection.send(pb.Command(submit=submit))
        return attempt

    def forget(self, attempt: Attempt) -> None:
        if self._open.pop(attempt.attempt_id, None) is None:
            return
        self._settle(attempt)
        if not attempt.is_over and self._connection is not None:
            self._connection.send(pb.Command(cancel=pb.Cancel(request_id=attempt.attempt_id)))

    def release(self, handle: pb.KvHandle) -> None:
        """Tell the worker that nobody will read this KV; without a connection its lease expires."""
        if self.info is not None and self._connection is not None and self.info.epoch == handle.epoch:
            self._connection.send(pb.Command(release=pb.Release(lease_id=handle.lease_id, epoch=handle.epoch)))

    async def drain(self, grace_seconds: float) -> int:
        """Ask the worker to take no more requests and end; how many it still has. Raises UnavailableError."""
        if self._connection is None:
            raise UnavailableError(f"worker {self.worker_id} is not connected")
        num_open = await self._connection.drain(grace_seconds)
        self.load.draining = True  # its next report says so, too
        return num_open

    async def undrain(self) -> None:
        """Ask a draining worker to take requests again. Raises UnavailableError."""
        if self._connection is None:
            raise UnavailableError(f"worker {self.worker_id} is not connected")
        await self._connection.undrain()
        self.load.draining = False

    # -- what the connection calls -----------------------------------------------------------------------------

    def attached(self, info: pb.WorkerInfo, connection: Connection) -> None:
        """The stream is open: requests may come."""
        self.info, self._connection = info, connection
        self.last_sign = time.monotonic()
        logger.info("%s worker %s attached (%s)", self.role, info.worker_id, self.address)
        self.set_serving(True)

    def set_serving(self, is_serving: bool) -> None:
        """What the worker says about its health."""
        if is_serving and not self.is_serving:
            self._on_usable()
        self.is_serving = is_serving

    def lost(self, reason: str) -> None:
        """The stream has ended: forget the worker's state and fail what is open here."""
        if self.info is None:
            return
        logger.warning("lost %s worker %s: %s (%d open requests)", self.role, self.worker_id, reason, len(self._open))
        self._index.remove_worker(self.worker_id)
        abandoned, self._open = self._open, {}
        self.num_lost += 1
        self.lost_time = time.monotonic()
        self.breaker.record_failure(self.lost_time)
        name = self.worker_id
        self.info, self._connection, self.is_serving = None, None, False
        self.load = pb.LoadReport()
        self._pending_tokens = 0
        for attempt in abandoned.values():
            attempt.pending_tokens = 0
            attempt.is_over = True
            attempt.mailbox.fail(WorkerLostError(f"the connection to worker {name} was lost"))

    def apply(self, report: pb.StepReport) -> None:
        """One step of the worker: the hot path, once per step for all requests here."""
        now = self.last_sign = time.monotonic()
        opened = self._open
        for delta in report.deltas:
            attempt = opened.get(delta.request_id)
            if attempt is None:  # ended here while the step ran there
                if delta.HasField("kv_handle"):
                    self.release(delta.kv_handle)
                continue
            if attempt.is_over:
                continue  # nothing comes after the end
            if attempt.times is None:
                self._first_delta(attempt, delta)
            if delta.finish_reason:
                attempt.is_over = True
            attempt.mailbox.put(delta)
        for failure in report.failures:
            attempt = opened.get(failure.request_id)
            if attempt is not None:
                attempt.is_over = True
                if failure.code == pb.FAILURE_CODE_UNAVAILABLE:
                    self.breaker.record_failure(now)
                attempt.mailbox.fail(error_of(failure))
        if report.HasField("load"):
            self.load = report.load
            self.rates.observe_load(report.load)
        if report.kv_events:
            self._apply_events(report)

    def _first_delta(self, attempt: Attempt, delta: pb.TokenDelta) -> None:
        attempt.times = delta.times
        self._settle(attempt)
        self.rates.observe_times(attempt.num_prompt_tokens, delta.times, self.last_sign)
        self.breaker.record_success()

    def _settle(self, attempt: Attempt) -> None:
        """Take back what was reserved for the attempt."""
        self._pending_tokens -= attempt.pending_tokens
        attempt.pending_tokens = 0

    def _apply_events(self, report: pb.StepReport) -> None:
        worker = self.worker_id
        complete = True
        for event in report.kv_events:
            kind = event.WhichOneof("kind")
            if kind == "snapshot":
                self._index.snapshot(worker, event.sequence, [BlockKey(key) for key in event.snapshot.keys])
                complete = True
            elif kind == "stored":
                complete = self._index.apply(worker, event.sequence, stored=map(BlockKey, event.stored.keys))
            elif kind == "removed":
                complete = self._index.apply(worker, event.sequence, removed=map(BlockKey, event.removed.keys))
        if not complete and (self._resync is None or self._resync.done()):
            self._resync = asyncio.create_task(self._fetch_snapshot())

    async def _fetch_snapshot(self) -> None:
        """After a gap: all keys again."""
        info, connection, worker = self.info, self._connection, self.worker_id
        if connection is None:
            return  # lost in the meantime, and with it all that the index knew
        logger.warning("events of worker %s have a gap: fetching a snapshot", worker)
        for event in await connection.fetch_snapshot():
            if event.HasField("snapshot") and self.info is info:
                self._index.snapshot(worker, event.sequence, [BlockKey(key) for key in event.snapshot.keys])
