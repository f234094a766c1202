"""Dispatch of one model's choices: admission, placement on workers, waiting for workers, metrics.

A choice (`router.choice`) calls this before each of its legs. Uses token ids only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence, Set

from common.errors import OverloadedError, UnavailableError
from kvstore.types import WorkerId
from router.config import RouterConfig
from router.journal import Journal, Placement
from router.metrics import RouterMetrics
from router.workers.failures import WorkerLostError
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import Leg, WorkerLink

LOOK_SECONDS = 0.25  # interval of checks for a usable worker: one that stops draining sends no event


class RequestLog:
    """Takes events of choices and drops them. `router/explain` keeps them."""

    def first_delta(self, journal: Journal, leg: Leg, expected_cached_tokens: int | None) -> None:
        """Called when a leg has begun. expected_cached_tokens: None if its prompt was computed before."""

    def ended(self, journal: Journal, now: float) -> None: ...


class Roles:
    """Places requests on the least loaded workers of each role. `router/costs` places by predicted costs.

    A decode worker computes a prompt itself when few of its tokens are uncached there, or when there is no prefill
    worker.
    """

    def __init__(self, config: RouterConfig, workers: ModelWorkers) -> None:
        self._config, self._workers = config, workers

    def choose(self, journal: Journal, prefill: Sequence[WorkerLink], decode: Sequence[WorkerLink]) -> Placement:
        """Choose the least loaded workers, of equally loaded ones those with the longest cached prefix."""
        in_cache = self._workers.cached_tokens(journal.packed_prompt, journal.request)

        def num_cached(link: WorkerLink) -> int:
            # Sampling needs the logits of the last token, so it is always computed.
            return min(in_cache.get(link.worker_id, 0), journal.num_tokens - 1)

        def order(link: WorkerLink) -> tuple[int, int, float]:
            return link.num_requests, -num_cached(link), random.random()

        target = min(decode, key=order)
        if not prefill or journal.num_tokens - num_cached(target) <= self._config.local_prefill_tokens:
            return Placement(target.worker_id, None, num_cached(target))
        source = min(prefill, key=order)
        return Placement(target.worker_id, source.worker_id, num_cached(source))

    def due_seconds(self, chosen: Placement, num_new_tokens: int, waited_seconds: float, has_started: bool) -> float:
        """Return the seconds until the next token is due; 0: no objective."""
        return 0.0

    def watch_kept(self, leg: Leg) -> None:
        """Called with a leg that decodes on a prefill worker, from where it may have to move."""

    def queue_began(self, now: float) -> None:
        """Called when a choice begins to wait for its first token while no other does."""

    def first_token(self, now: float) -> None:
        """Called when a choice has its first token."""

    def queue_seconds(self, num_waiting: int, now: float) -> float:
        """Return the expected time until num_waiting choices have their first tokens; 0: unknown."""
        return 0.0

    def answered(self, journal: Journal, leg: Leg, now: float) -> None:
        """Called when an answer has ended with this leg."""


class Dispatcher:
    """Dispatch of one model's choices. Use it only in the event loop that serves."""

    def __init__(self, config: RouterConfig, workers: ModelWorkers, metrics: RouterMetrics, roles: Roles) -> None:
        self.config = config
        self.metrics = metrics
        self.roles = roles
        self.log = RequestLog()
        self.open_choices: set[Journal] = set()
        self.num_waiting = 0  # open choices without a first token
        self._workers = workers
        self._waiting: dict[Callable[[], None], None] = {}  # callbacks that wait for a decode worker, oldest first
        self._look_timer: asyncio.TimerHandle | None = None
        workers.on_usable = lambda: asyncio.get_running_loop().call_soon(self._look)

    @property
    def num_running(self) -> int:
        return len(self.open_choices) - self.num_waiting

    def admit(self) -> None:
        """Raise OverloadedError when too many choices wait already, UnavailableError without a worker to wait for."""
        now = time.monotonic()
        if self.num_waiting + 1 > self.config.max_queue:
            seconds = self.roles.queue_seconds(self.num_waiting, now)
            raise OverloadedError("the server is overloaded: too many requests are waiting", seconds)
        self._check_absence(now)

    # -- placement ---------------------------------------------------------------------------------------------

    def place(self, journal: Journal, lost: Set[WorkerId]) -> Placement:
        """Place a choice on usable workers, on those in `lost` only without others. There must be a decode worker.
        Raises OverloadedError for a new choice that is refused."""
        # With tokens to replay, or after a failure of every prefill worker, the decode worker computes the prompt.
        prefill = [] if journal.has_started else self._workers.usable("prefill", lost)
        prefill = [link for link in prefill if link.worker_id not in lost]
        return self.roles.choose(journal, prefill, self._workers.usable("decode", lost))

    def decode_link(self, chosen: WorkerId, lost: Set[WorkerId]) -> WorkerLink:
        """Return the worker chosen before the prefill, or the least loaded one if that has gone since."""
        links = self._workers.usable("decode", lost)
        for link in [*links, *self._workers.usable("prefill", lost)]:
            if link.worker_id == chosen:
                return link
        return min(links, key=lambda link: link.num_requests)

    def link(self, worker: WorkerId) -> WorkerLink:
        """Return the link of a worker. Raises WorkerLostError when it is not attached any more."""
        link = self._workers.find(worker)
        if link is None:
            raise WorkerLostError(f"worker {worker} has gone")
        return link

    # -- waiting for a worker ----------------------------------------------------------------------------------

    def has_decode_worker(self) -> bool:
        return bool(self._workers.usable("decode"))

    def wait(self, look_again: Callable[[], None]) -> None:
        """Call `look_again` once, when a worker becomes usable or LOOK_SECONDS have passed.

        Raises UnavailableError when the last decode worker has been gone for too long.
        """
        self._check_absence(time.monotonic())
        self._waiting[look_again] = None
        if self._look_timer is None:
            self._look_timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def stop_waiting(self, look_again: Callable[[], None]) -> None:
        self._waiting.pop(look_again, None)

    def _look(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        waiting, self._waiting = self._waiting, {}
        for look_again in waiting:
            look_again()

    def _check_absence(self, now: float) -> None:
        """Raise UnavailableError when the last decode worker has been gone for too long."""
        if self._workers.seconds_without_decode(now) > self.config.worker_wait_seconds:
            raise UnavailableError("no decode worker is available")

    # -- bookkeeping -------------------------------------------------------------------------------------------

    def opened(self, journal: Journal) -> None:
        if not self.num_waiting:
            self.roles.queue_began(journal.arrival)
        self.num_waiting += 1
        self.open_choices.add(journal)

    def first_token(self, journal: Journal, now: float) -> None:
        self.num_waiting -= 1
        self.roles.first_token(now)
        self.metrics.time_to_first_token.observe(now - journal.arrival)
        self.metrics.prompt_tokens.inc(len(journal.prompt_token_ids))

    def leg_began(self, journal: Journal, leg: Leg, chosen: Placement) -> None:
        """Log the worker's measurements up to the first delta; compare its cached tokens with the expected number."""
        assert leg.times is not None
        expected = None
        if leg.link.role == "prefill" or chosen.prefill is None:  # the leg computes the prompt
            expected = chosen.cached_tokens
            self.metrics.expected_tokens.inc(expected)
            self.metrics.regret_tokens.inc(max(0, expected - leg.times.num_cached_tokens))
        self.log.first_delta(journal, leg, expected)

    def closed(self, journal: Journal) -> None:
        if not journal.has_started:
            self.num_waiting -= 1
        if journal.kv_handle is not None:  # the choice ended before a decode worker got the handle
            link = self._workers.find(journal.kv_handle.worker_id)
            if link is not None:
                link.release(journal.kv_handle)
        now = time.monotonic()
        self.open_choices.remove(journal)
        self.metrics.choice_ended(journal, now)
        self.log.ended(journal, now)
