"""Dispatch of one model's choices: admission, choice of workers, the wait for workers, counts.

A choice (`router.choice`) asks here before each of its legs. Speaks token ids only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence, Set

from common.errors import OverloadedError, UnavailableError
from common.wings import has_wing
from kvstore.types import WorkerId
from router.config import RouterConfig
from router.journal import Journal
from router.metrics import RouterMetrics
from router.routing.policy import Decision, choose
from router.routing.rates import AnswerLength, DrainRate
from router.routing.views import Candidate, RequestView, WorkerView
from router.workers.failures import WorkerLostError
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import Leg, WorkerLink

HAS_LATE_REFUSALS = has_wing("router.late_refusals")
if HAS_LATE_REFUSALS:
    from router.late_refusals.refusals import check_in_time
    from router.late_refusals.settings import LateRefusalSettings
HAS_SHORTLISTS = has_wing("router.routing.shortlists")
if HAS_SHORTLISTS:
    from router.routing.shortlists.shortlist import shortlist

LOOK_SECONDS = 0.25  # between looks for a usable worker: one that stops draining sends no event


class RequestLog:
    """Where choices went and why, as it becomes known. `router/explain` keeps it."""

    def decided(self, journal: Journal, decision: Decision) -> None:
        """Workers have been chosen."""

    def first_delta(self, journal: Journal, leg: Leg, expected_cached_tokens: int | None) -> None:
        """A leg has begun; None where its prompt was computed before."""

    def ended(self, journal: Journal, now: float) -> None: ...


class Roles:
    """Who computes and decodes a request: workers of either role, by the policy. `router/objectives` weighs more."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config

    def choose(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        """Choose as `policy.choose`."""
        return choose(self._config.policy, request, prefill, decode, self._config.local_prefill_tokens)

    def due_seconds(self, chosen: Candidate, num_new_tokens: int, waited_seconds: float, has_started: bool) -> float:
        """Seconds until the next token is due; 0: no objective."""
        return 0.0

    def watch_kept(self, leg: Leg) -> None:
        """Look after a leg that decodes on a prefill worker."""


class Dispatcher:
    """Dispatch of one model's choices. Belongs to the running event loop."""

    def __init__(self, config: RouterConfig, workers: ModelWorkers, metrics: RouterMetrics, roles: Roles) -> None:
        self.config = config
        self.metrics = metrics
        self.roles = roles
        self.log = RequestLog()
        self.answers = AnswerLength()
        self.open_choices: set[Journal] = set()
        self.num_waiting = 0  # of these, without a first token
        self._workers = workers
        self._random = random.Random()
        self._turn = 0
        self._drain = DrainRate()
        self._max_wait_seconds = config.of(LateRefusalSettings).max_wait_seconds if HAS_LATE_REFUSALS else 0.0
        self._waiting: dict[Callable[[], None], None] = {}  # for a decode worker, oldest first
        self._look_timer: asyncio.TimerHandle | None = None
        workers.on_usable = lambda: asyncio.get_running_loop().call_soon(self._look)

    @property
    def num_running(self) -> int:
        return len(self.open_choices) - self.num_waiting

    def admit(self) -> None:
        """Raise OverloadedError when too many choices wait already, UnavailableError with no worker to wait for."""
        now = time.monotonic()
        if self.num_waiting + 1 > self.config.max_queue:
            seconds = self._drain.seconds(self.num_waiting, now)
            raise OverloadedError("the server is overloaded: too many requests are waiting", seconds)
        self._check_absence(now)

    # -- which workers are next --------------------------------------------------------------------------------

    def decide(self, journal: Journal, lost: Set[WorkerId]) -> Decision:
        """Choose among the usable workers, those in `lost` last.

        Raises UnavailableError without a decode worker, OverloadedError for a new choice that would have to wait for
        too long.
        """
        self._turn += 1
        request = RequestView(
            num_tokens=journal.num_tokens,
            cached_tokens=self._workers.cached_tokens(journal.packed_prompt, journal.request),
            expected_tokens=self.answers.expected(journal.sampling.max_tokens),
            session=journal.session,
            draw=self._random.random(),
            turn=self._turn,
            lacking_adapter=self._workers.lacking_adapter(journal.request),
        )
        # With tokens to replay, or when every prefill worker has failed it, a choice is computed where it decodes.
        prefill = [] if journal.has_started else self._workers.usable("prefill", lost)
        prefill = [link for link in prefill if link.worker_id not in lost]
        decode = self._workers.usable("decode", lost)
        decision = self.roles.choose(request, self._views(prefill, request), self._views(decode, request))
        if HAS_LATE_REFUSALS and not journal.num_legs:
            check_in_time(decision.chosen, journal.deadline - time.monotonic(), self._max_wait_seconds)
        self.log.decided(journal, decision)
        return decision

    def _views(self, links: Sequence[WorkerLink], request: RequestView) -> list[WorkerView]:
        """The workers among which the policy chooses, as it sees them."""
        if HAS_SHORTLISTS:
            links = shortlist(self.config.policy, links, request)
        return [link.view() for link in links]

    def decode_link(self, chosen: WorkerId, lost: Set[WorkerId]) -> WorkerLink:
        """The worker chosen before the prefill ran, or the least loaded one when it has gone since."""
        links = self._workers.usable("decode", lost)
        for link in [*links, *self._workers.usable("prefill", lost)]:
            if link.worker_id == chosen:
                return link
        return min(links, key=lambda link: link.view().load)

    def link(self, worker: WorkerId) -> WorkerLink:
        """Link of a worker. Raises WorkerLostError when it is not attached any more."""
        link = self._workers.find(worker)
        if link is None:
            raise WorkerLostError(f"worker {worker} has gone")
        return link

    # -- waiting for a worker ----------------------------------------------------------------------------------

    def has_decode_worker(self) -> bool:
        return bool(self._workers.usable("decode"))

    def wait(self, look_again: Callable[[], None]) -> None:
        """Call `look_again`, once, when a worker has become usable, or a little later in any case.

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
        """Raise UnavailableError when the last decode worker has been gone for too long to come back."""
        if self._workers.seconds_without_decode(now) > self.config.worker_wait_seconds:
            raise UnavailableError("no decode worker is available")

    # -- bookkeeping -------------------------------------------------------------------------------------------

    def opened(self, journal: Journal) -> None:
        if not self.num_waiting:
            self._drain.began(journal.arrival)
        self.num_waiting += 1
        self.open_choices.add(journal)

    def first_token(self, journal: Journal, now: float) -> None:
        self.num_waiting -= 1
        self._drain.observe(now)
        self.metrics.time_to_first_token.observe(now - journal.arrival)
        self.metrics.prompt_tokens.inc(len(journal.prompt_token_ids))

    def leg_began(self, journal: Journal, leg: Leg, chosen: Candidate) -> None:
        """Log what the worker measured up to the first delta; compare its cache hit with the expected one."""
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
        if journal.kv_handle is not None:  # the end came before a decode worker was given it
            link = self._workers.find(journal.kv_handle.worker_id)
            if link is not None:
                link.release(journal.kv_handle)
        now = time.monotonic()
        self.open_choices.remove(journal)
        self.metrics.choice_ended(journal, now)
        self.log.ended(journal, now)
