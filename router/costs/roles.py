"""Roles chosen by the policy: predicted costs, or one of `router/routing/policies`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from common.wings import has_wing
from kvstore.pool.block_hash import root_key
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.config import RouterConfig
from router.costs.meter import WorkerMeter, meter_of
from router.dispatch import Roles
from router.journal import Journal
from router.routing.policy import Decision, choose
from router.routing.rates import AnswerLength, DrainRate
from router.routing.settings import RoutingSettings
from router.routing.views import Candidate, RequestView, WorkerView
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import Leg, WorkerLink

HAS_LATE_REFUSALS = has_wing("router.late_refusals")
if HAS_LATE_REFUSALS:
    from router.late_refusals.refusals import check_in_time
    from router.late_refusals.settings import LateRefusalSettings
HAS_SHORTLISTS = has_wing("router.routing.shortlists")
if HAS_SHORTLISTS:
    from router.routing.shortlists.shortlist import shortlist


class PolicyRoles(Roles):
    """Shows the workers and the request to the policy. `router/objectives` extends it."""

    def __init__(self, config: RouterConfig, workers: ModelWorkers) -> None:
        super().__init__(config, workers)
        self.on_decision: Callable[[Journal, Decision], None] = lambda *_: None  # for `router/explain`
        workers.new_meter = WorkerMeter
        self.answers, self._drain = AnswerLength(), DrainRate()
        self._policy = config.of(RoutingSettings).policy
        self._random = random.Random()
        self._turn = 0
        self._max_wait_seconds = config.of(LateRefusalSettings).max_wait_seconds if HAS_LATE_REFUSALS else 0.0

    def choose(self, journal: Journal, prefill: Sequence[WorkerLink], decode: Sequence[WorkerLink]) -> Candidate:
        """Choose a placement. Raises OverloadedError for a new choice that would have to wait too long."""
        self._turn += 1
        request = RequestView(
            num_tokens=journal.num_tokens,
            cached_tokens=self._workers.cached_tokens(journal.packed_prompt, journal.request),
            expected_tokens=self.answers.expected(journal.sampling.max_tokens),
            session=journal.session,
            draw=self._random.random(),
            turn=self._turn,
            lacking_adapter=self._lacking_adapter(journal.request),
        )
        decision = self.decide(request, self._views(prefill, request), self._views(decode, request))
        if HAS_LATE_REFUSALS and not journal.num_legs:
            check_in_time(decision.chosen, journal.deadline - time.monotonic(), self._max_wait_seconds)
        self.on_decision(journal, decision)
        return decision.chosen

    def decide(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        """Choose among views, see `policy.choose`."""
        return choose(self._policy, request, prefill, decode, self._config.local_prefill_tokens)

    def queue_began(self, now: float) -> None:
        self._drain.began(now)

    def first_token(self, now: float) -> None:
        self._drain.observe(now)

    def queue_seconds(self, num_waiting: int, now: float) -> float:
        return self._drain.seconds(num_waiting, now)

    def answered(self, journal: Journal, leg: Leg, now: float) -> None:
        num_tokens = len(journal.output_token_ids)
        if journal.sampling.max_tokens > 1:  # otherwise the length says nothing about other answers
            self.answers.observe(num_tokens)
        meter_of(leg.link).rates.observe_answer(num_tokens - leg.num_tokens_at_first, now - leg.first_time)

    def _views(self, links: Sequence[WorkerLink], request: RequestView) -> list[WorkerView]:
        """Return the policy's views of the workers that it chooses among."""
        meters: Sequence[WorkerMeter] = [meter_of(link) for link in links]
        if HAS_SHORTLISTS:
            meters = shortlist(self._policy, meters, request)
        return [meter.view() for meter in meters]

    def _lacking_adapter(self, request: pb.Submit) -> frozenset[WorkerId]:
        """Return workers that the index knows no KV of the adapter on, and that must probably read it first."""
        if not request.adapter or not (infos := self._workers.infos()):
            return frozenset()
        holding = self._workers.index.matches([root_key(infos[0].model_fingerprint, request.adapter)])
        return frozenset(WorkerId(info.worker_id) for info in infos) - holding.keys()
