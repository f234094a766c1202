"""One choice of a request, as a state machine that workers push forward:

    NEW -> (WAITING ->) PREFILL -> DECODE -> DONE

Each delta of the open leg is journaled, becomes text and reaches the sink in the same call, from the report callback
of the worker's link: no task waits for tokens. A lost worker costs time, not tokens: the choice goes back to choosing
workers, with prompt and tokens so far as the prompt. Whatever happens, its request is notified of exactly one end.
Uses token ids only; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum
from typing import Protocol

from common.errors import DeadlineExceededError, EngineError, MiniInferError, OverloadedError, UnavailableError
from common.logging import RateLimit, about
from common.wings import call_wing
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.api.text import ChoiceText, Update
from router.dispatch import Dispatcher
from router.journal import DEADLINE_EXCEEDED, FIRST_OUTPUT, MOVED, WAITING, Journal, Placement
from router.workers.failures import WorkerLostError
from router.workers.worker_link import Leg, WorkerLink

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())
RETRYABLE = (WorkerLostError, OverloadedError)  # another worker may do better


class State(Enum):
    NEW = "new"  # not started
    WAITING = "waiting"  # for a decode worker
    PREFILL = "prefill"  # a prefill leg is open
    DECODE = "decode"  # a decode leg is open; it also computes the prompt if there was no prefill leg
    DONE = "done"


class ChoiceListener(Protocol):
    """The interface of a request for its choices."""

    def on_update(self, choice: Choice, update: Update) -> None:
        """Take an update. One with a finish reason is the last."""

    def on_failure(self, choice: Choice, error: Exception) -> None:
        """Take the choice's failure; no update follows."""


class Choice:
    """One choice. Call `start` once; `cancel` ends it without notifying its request."""

    def __init__(self, index: int, journal: Journal, text: ChoiceText, dispatcher: Dispatcher) -> None:
        self.index = index
        self.journal = journal
        self.text = text
        self.state = State.NEW
        self.dispatcher = dispatcher
        self._observe_gap = dispatcher.metrics.inter_token_latency.observe
        self._request: ChoiceListener
        self._timer: asyncio.TimerHandle
        self.placement: Placement | None = None  # kept until another worker is needed
        self.leg: Leg | None = None
        self._lost: set[WorkerId] = set()  # workers to avoid: they failed this choice

    def start(self, request: ChoiceListener) -> None:
        self._request = request
        self.dispatcher.opened(self.journal)
        exceeded = DeadlineExceededError("the request took longer than it was given")
        delay = self.journal.deadline - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(delay, self.on_failure, exceeded)
        self._go_on()

    def cancel(self) -> None:
        """End without notifying the request, and free the choice's resources on workers."""
        if self.state is State.NEW:
            self.state = State.DONE
        elif self.state is not State.DONE:
            self._close("abort")

    # -- next leg ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Open the next leg, on other workers if the chosen one refuses, or wait for a worker, or fail."""
        try:
            while True:
                try:
                    self._open_next_leg()
                    return
                except RETRYABLE as error:
                    self._allow_retry(error)
        except Exception as error:  # noqa: BLE001 - bugs too: the callers are callbacks, which would swallow them
            self._fail(error)

    def _open_next_leg(self) -> None:
        """Submit to the next worker, or wait for one. Raises one of RETRYABLE, or an error that ends the choice."""
        dispatcher = self.dispatcher
        if not dispatcher.has_decode_worker():
            self._wait()
            return
        if self.placement is None:
            chosen = self.placement = dispatcher.place(self.journal, self._lost)
            if self.journal.kv_handle is None:  # else the prompt is computed already, and its placement counted
                dispatcher.metrics.placements[chosen.kind].inc()
            if chosen.prefill is not None:
                self._open(State.PREFILL, chosen, dispatcher.link(chosen.prefill), dispatcher.link(chosen.decode))
                return
        chosen = self.placement
        self._open(State.DECODE, chosen, dispatcher.decode_link(chosen.decode, self._lost))

    def _wait(self) -> None:
        self.dispatcher.wait(self.look_again)
        if self.state is not State.WAITING:
            self.state = State.WAITING
            self.journal.note(time.monotonic(), WAITING)

    def look_again(self) -> None:
        """Try again after a wait: a decode worker may be back, or the wait may have taken too long."""
        if self.state is State.WAITING:
            self._go_on()

    def _open(self, state: State, chosen: Placement, link: WorkerLink, next_link: WorkerLink | None = None) -> None:
        now = time.monotonic()
        is_computed = self.journal.kv_handle is not None
        num_new_tokens = 0 if is_computed else max(self.journal.num_tokens - chosen.cached_tokens, 0)
        submit = self.journal.next_submit(now)
        submit.keep = state is State.DECODE
        roles, waited = self.dispatcher.roles, now - self.journal.arrival
        submit.due_seconds = roles.due_seconds(chosen, num_new_tokens, waited, self.journal.has_started)
        self.leg = link.submit(submit, num_new_tokens, self, next_link)
        self.state = state
        self.journal.note(now, state.value, worker=link.worker_id)

    # -- events of workers -------------------------------------------------------------------------------------

    def on_delta(self, leg: Leg, delta: pb.TokenDelta, now: float) -> None:
        """Journal a step's tokens and pass them to the request. The hot path: keep it short."""
        try:
            token_ids = delta.token_ids[:]  # a list, in a third of list()'s time
            self._record(token_ids, now)
            if not leg.first_time:
                self._leg_began(leg, now)
            is_last = bool(delta.finish_reason)
            if is_last:
                self._leg_ended(leg, delta, now)
            update = self.text.push(token_ids, delta)
            self._request.on_update(self, update)
            if update.finish_reason is not None:
                self._close(update.finish_reason)
            elif is_last:
                self._go_on()
        except Exception as error:  # noqa: BLE001 - a bug in one choice must not end the link, which carries all of them
            self._fail(error)

    def on_failure(self, error: MiniInferError) -> None:
        """Retry or fail: the leg has failed, the deadline is exceeded, or the wait for a worker has timed out."""
        if self.state is State.DONE:
            return
        try:
            if self.leg is not None:
                error = self._attribute_error(self.leg, error)
            self._allow_retry(error)
        except Exception as fatal:  # noqa: BLE001 - bugs, too
            self._fail(fatal)
        else:
            self._go_on()

    def _record(self, token_ids: list[int], now: float) -> None:
        journal = self.journal
        if journal.output_token_ids:
            self._observe_gap(now - journal.last_token_time)
        elif token_ids:
            journal.first_token_time = now
            self.dispatcher.first_token(journal, now)
        else:
            return  # a delta of prompt logprobs may come before the first token
        journal.output_token_ids += token_ids
        journal.last_token_time = now

    def _leg_began(self, leg: Leg, now: float) -> None:
        leg.first_time, leg.num_tokens_at_first = now, len(self.journal.output_token_ids)
        if self.state is State.DECODE:
            self.journal.kv_handle = None  # the worker has read the KV
            if leg.link.role == "prefill":
                self.dispatcher.roles.watch_kept(leg)
        if self.journal.first_times is None:
            self.journal.first_times = leg.times
        self.journal.note(now, FIRST_OUTPUT, worker=leg.link.worker_id, times=leg.times)
        assert self.placement is not None  # a leg is open
        self.dispatcher.leg_began(self.journal, leg, self.placement)

    def _leg_ended(self, leg: Leg, delta: pb.TokenDelta, now: float) -> None:
        """Take the worker's last delta: update counts, and keep what the next leg needs."""
        self.leg, journal = None, self.journal
        if delta.HasField("kv_handle"):
            journal.kv_handle = delta.kv_handle
        journal.num_draft_tokens += delta.num_draft_tokens
        journal.num_accepted_tokens += delta.num_accepted_tokens
        if delta.finish_reason == pb.FINISH_REASON_PREFILLED:
            if leg.next_link is None:
                raise EngineError("the worker did not finish the request")
            if self.state is State.DECODE:
                self.journal.num_moves += 1
                self.dispatcher.metrics.moves.inc()
        elif delta.finish_reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
            self.dispatcher.roles.answered(journal, leg, now)

    def _attribute_error(self, leg: Leg, error: MiniInferError) -> MiniInferError:
        """Turn a leg's failure into the choice's error; avoid the worker from now on if another may do better."""
        if isinstance(error, EngineError) and self.state is State.PREFILL:  # decode workers can compute prompts, too
            lost = WorkerLostError(f"prefill failed: {error}")
            lost.__cause__ = error
            error = lost
        if isinstance(error, WorkerLostError):
            suspicion: EngineError | None = call_wing("router.grammar.suspects:suspicion", self.journal, leg)
            if suspicion is not None:
                return suspicion
        if isinstance(error, RETRYABLE):
            self._lost.add(leg.link.worker_id)
        return error

    def _allow_retry(self, error: MiniInferError) -> None:
        """Prepare another try, or raise the error that ends the choice."""
        journal, max_retries = self.journal, self.dispatcher.config.max_retries
        if not isinstance(error, RETRYABLE) or (isinstance(error, OverloadedError) and not journal.num_legs):
            raise error  # an OverloadedError before the first leg refuses the request
        journal.leg_failed()
        if journal.num_failures_in_row > max_retries:
            if isinstance(error, OverloadedError):
                raise error
            raise UnavailableError(f"gave up after {journal.num_failures_in_row} failed attempts: {error}") from error
        self.leg = self.placement = None
        journal.num_migrations += 1
        journal.note(time.monotonic(), MOVED, reason=str(error))
        self.dispatcher.metrics.migrations.inc()
        logger.warning("%s moves to another worker (%s)", journal.choice_id, error, extra=about(journal.choice_id))

    # -- end ---------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        if self.state is State.DONE:
            return
        outcome = "error"
        if isinstance(error, DeadlineExceededError):
            self.journal.note(time.monotonic(), DEADLINE_EXCEEDED)
            outcome = "length" if self.journal.has_started else "error"
        elif isinstance(error, OverloadedError) and not self.journal.has_started:
            outcome = "refused"  # the client is told to retry
        self._close(outcome)
        self._request.on_failure(self, error)

    def _close(self, outcome: str) -> None:
        """Release all resources; callers notify the request after this."""
        self.state = State.DONE
        self.journal.outcome = outcome
        self._timer.cancel()
        self.dispatcher.stop_waiting(self.look_again)
        if self.leg is not None:
            if self.leg.link.close(self.leg):  # its worker may be reading the KV, and releases it itself
                self.journal.kv_handle = None
            self.leg = None
        self.dispatcher.closed(self.journal)
