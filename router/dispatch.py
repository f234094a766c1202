"""The whole path of one choice: admission -> journal -> choose -> prefill -> decode -> resume.

`Dispatcher.generate` yields what workers report, each token once, whichever worker made it. A worker that is
lost on the way costs time, not tokens: the journal's prompt and tokens so far go to another one, or wait for one.
Speaks token ids only; text, stop strings and HTTP live above.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from common.errors import DeadlineExceededError, EngineError, MiniInferError, OverloadedError, UnavailableError
from common.logging import RateLimit
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.cluster.admission import AnswerLength, check_in_time
from router.cluster.failures import WorkerLostError
from router.cluster.policy import EXPECTED_TOKENS, Decision, RequestView, choose, policy_by_name
from router.cluster.worker_link import WorkerLink
from router.cluster.workers import WorkerTable
from router.config import RouterConfig
from router.explain import ExplainLog
from router.journal import Journal
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
LOOK_SECONDS = 0.25  # between looks for a worker: breakers close without telling
RETRYABLE = (WorkerLostError, OverloadedError)  # another worker may do better
_OUTCOMES = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Dispatcher:
    """Serves choices on the workers of a table."""

    def __init__(
        self, config: RouterConfig, workers: WorkerTable, metrics: RouterMetrics, explain: ExplainLog
    ) -> None:
        self._config = config
        self._workers = workers
        self._metrics = metrics
        self._explain = explain
        self._policy = policy_by_name(config.policy)
        self._random = random.Random()
        self._turn = 0
        self._answers = AnswerLength()
        self.num_waiting = 0  # admitted, first token not seen yet
        self.num_running = 0

    def admit(self) -> None:
        """Raise OverloadedError when too many requests wait already, UnavailableError with no worker to wait for."""
        if self.num_waiting + 1 > self._config.max_queue:
            raise OverloadedError("the server is overloaded: too many requests are waiting", self._retry_after())
        self._check_absence(time.monotonic())

    async def generate(self, journal: Journal) -> AsyncGenerator[list[pb.TokenDelta], None]:
        """All deltas of one choice, in order; ends after one with a finish reason. Raises MiniInferError."""
        lost: set[WorkerId] = set()
        self._opened(journal)
        try:
            while True:
                try:
                    decision = await self._decide(journal, lost)
                    async with aclosing(self._attempt(journal, decision, lost)) as steps:
                        async for deltas in steps:
                            yield deltas
                    return
                except RETRYABLE as error:
                    self._count_migration(journal, error)
        except DeadlineExceededError:
            journal.note(time.monotonic(), "time is over")
            journal.outcome = "length" if journal.has_started else "error"
            raise
        except MiniInferError:
            journal.outcome = "error"
            raise
        finally:
            self._closed(journal)

    # -- choose ------------------------------------------------------------------------------------------------

    async def _decide(self, journal: Journal, lost: set[WorkerId]) -> Decision:
        """Which workers are next. Raises OverloadedError for a new request that would have to wait for too long."""
        decode = await self._decode_workers(journal, lost)
        self._turn += 1
        request = RequestView(
            num_tokens=journal.num_tokens,
            cached_tokens=self._workers.cached_tokens(journal.prompt_token_ids, journal.cache_salt),
            expected_tokens=self._answers.expected(journal.sampling.max_tokens, EXPECTED_TOKENS),
            session=journal.session,
            draw=self._random.random(),
            turn=self._turn,
        )
        # With tokens to replay, the KV of prompt and output is computed where decoding goes on; so it is when no
        # prefill worker is left that has not failed already.
        prefill = [] if journal.has_started else self._workers.usable("prefill", lost)
        decision = choose(
            self._policy,
            request,
            [link.view() for link in prefill if link.worker_id not in lost],
            [link.view() for link in decode],
            self._config.local_prefill_tokens,
        )
        if not journal.num_attempts:
            check_in_time(decision.chosen, journal.deadline - time.monotonic(), self._config.max_wait_seconds)
        self._explain.decided(journal, decision)
        return decision

    async def _decode_workers(self, journal: Journal, lost: set[WorkerId]) -> list[WorkerLink]:
        """Return the usable decode workers, or wait for one. Raises UnavailableError, DeadlineExceededError."""
        links = self._workers.usable("decode", lost)
        if links:
            return links
        journal.note(time.monotonic(), "waiting for a decode worker")
        journal.is_waiting_for_worker = True
        try:
            while not (links := self._workers.usable("decode", lost)):
                now = time.monotonic()
                self._check_absence(now)
                if now >= journal.deadline:
                    raise DeadlineExceededError("the request took longer than it was given")
                await self._workers.wait_for_usable(min(LOOK_SECONDS, journal.deadline - now))
            return links
        finally:
            journal.is_waiting_for_worker = False

    def _check_absence(self, now: float) -> None:
        """Raise UnavailableError when the last decode worker has been gone for too long to come back."""
        if self._workers.seconds_absent("decode", now) > self._config.worker_wait_seconds:
            raise UnavailableError("no decode worker is available")

    # -- prefill, then decode ----------------------------------------------------------------------------------

    async def _attempt(
        self, journal: Journal, decision: Decision, lost: set[WorkerId]
    ) -> AsyncGenerator[list[pb.TokenDelta], None]:
        """One try on the chosen workers. Raises what is in RETRYABLE when another try makes sense."""
        chosen = decision.chosen
        if chosen.prefill is not None:
            with self._link(chosen.decode).reserve():
                async with aclosing(self._leg(journal, chosen.prefill, lost, "prefill")) as steps:
                    async for deltas in steps:
                        last = deltas[-1]
                        if last.HasField("kv_handle"):  # before anybody may stop reading here
                            journal.kv_handle = last.kv_handle
                        yield deltas
                        if last.finish_reason not in (pb.FINISH_REASON_NONE, pb.FINISH_REASON_PREFILLED):
                            return
        elif journal.kv_handle is None:
            self._metrics.local_prefills.inc()
        decode = await self._decode_worker(journal, chosen.decode, lost)
        async with aclosing(self._leg(journal, decode, lost, "decode")) as steps:
            async for deltas in steps:
                journal.kv_handle = None  # it has been read
                yield deltas

    async def _decode_worker(self, journal: Journal, chosen: WorkerId, lost: set[WorkerId]) -> WorkerId:
        """The worker chosen before the prefill ran, or the least loaded one when it has gone since."""
        links = await self._decode_workers(journal, lost)
        if any(link.worker_id == chosen for link in links):
            return chosen
        return min(links, key=lambda link: link.view().load).worker_id

    async def _leg(
        self, journal: Journal, worker: WorkerId, lost: set[WorkerId], phase: str
    ) -> AsyncGenerator[list[pb.TokenDelta], None]:
        """Submit to one worker and pass on its deltas until it has finished its part."""
        link = self._link(worker)
        pending = 0 if journal.kv_handle is not None else journal.num_tokens
        submit = journal.submit(journal.next_attempt_id(), time.monotonic())
        attempt = link.open(submit, pending, journal.deadline)
        journal.note(time.monotonic(), f"{phase} on {worker}")
        is_first = True
        try:
            while True:
                deltas = await attempt.mailbox.take()
                now = time.monotonic()
                for delta in deltas:
                    self._received(journal, delta.token_ids, now)
                if is_first:
                    is_first = False
                    first_time, num_tokens_before = now, len(journal.output_token_ids)
                    self._explain.first_delta(journal, attempt, phase, now)
                    attempt.mailbox.shortcut = partial(self._pass_on, journal)
                reason = deltas[-1].finish_reason
                if reason in _OUTCOMES:
                    journal.outcome = _OUTCOMES[reason]
                    self._answers.observe(len(journal.output_token_ids))
                    link.rates.observe_answer(len(journal.output_token_ids) - num_tokens_before, now - first_time)
                yield deltas  # whoever reads may stop here
                if reason:
                    return
        except RETRYABLE:
            lost.add(worker)
            raise
        except EngineError as error:
            if phase == "decode":
                raise
            lost.add(worker)
            raise WorkerLostError(f"prefill failed: {error}") from error
        finally:
            attempt.close()

    def _link(self, worker: WorkerId) -> WorkerLink:
        for link in self._workers.links:
            if link.info is not None and link.info.worker_id == worker:
                return link
        raise WorkerLostError(f"worker {worker} has gone")

    # -- bookkeeping -------------------------------------------------------------------------------------------

    def _pass_on(self, journal: Journal, delta: pb.TokenDelta) -> bool:
        """Show a delta without waking the request's task; False when it has to take the ordinary way."""
        shortcut = journal.shortcut
        if shortcut is None or delta.finish_reason:
            return False
        token_ids = list(delta.token_ids)
        if not shortcut(token_ids):
            return False
        self._received(journal, token_ids, time.monotonic())
        return True

    def _received(self, journal: Journal, token_ids: Sequence[int], now: float) -> None:
        """Once per step and choice: keep it short."""
        if journal.output_token_ids:
            self._metrics.inter_token_latency.observe(now - journal.last_token_time)
        elif token_ids:
            self.num_waiting -= 1
            self.num_running += 1
            journal.first_token_time = now
            self._metrics.time_to_first_token.observe(now - journal.arrival)
        else:
            return  # prompt logprobs may come before the first token
        journal.output_token_ids.extend(token_ids)
        journal.last_token_time = now

    def _opened(self, journal: Journal) -> None:
        self.num_waiting += 1
        self._metrics.prompt_tokens.inc(len(journal.prompt_token_ids))

    def _closed(self, journal: Journal) -> None:
        if journal.output_token_ids:
            self.num_running -= 1
        else:
            self.num_waiting -= 1
        journal.shortcut = None
        if journal.kv_handle is not None:  # the end came before a decode worker has read it
            for link in self._workers.links:
                if link.info is not None and link.info.worker_id == journal.kv_handle.worker_id:
                    link.release(journal.kv_handle)
        now = time.monotonic()
        self._metrics.choice_ended(journal, now)
        self._explain.ended(journal, now)

    def _count_migration(self, journal: Journal, error: MiniInferError) -> None:
        """Allow another try, or raise the error that ends the choice."""
        if isinstance(error, OverloadedError) and not journal.num_attempts:
            raise error  # refused before anybody tried
        journal.attempt_failed()
        if journal.num_fruitless > self._config.max_retries:
            if isinstance(error, OverloadedError):
                raise error
            raise UnavailableError(f"gave up after {journal.num_fruitless} tries in vain: {error}") from error
        journal.num_migrations += 1
        self._metrics.migrations.inc()
        journal.note(time.monotonic(), f"moved: {error}")
        logger.warning("%s moves to another worker (%s)", journal.request_id, error)

    def _retry_after(self) -> float:
        """About the time until half of the queue is gone, by the steps that workers report."""
        links = self._workers.usable("decode")
        step = max((link.rates.step_seconds for link in links), default=0.0) or 0.02
        return min(max(self.num_waiting * step, 1.0), 30.0)
