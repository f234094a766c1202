"""Mailboxes of an engine's callers: every output goes to the mailbox of the caller that asked for it.

It knows neither text nor threads: `LLM` calls it while it holds its turn, `AsyncLLM` from its engine thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from common.errors import EngineError
from engine.engine import Engine
from engine.request import Request, RequestId, RequestOutput, SamplingParams

Mailbox = TypeVar("Mailbox")
TokensAndParams = tuple[list[int], SamplingParams, str]  # and the reference of an adapter; empty: none
Item = RequestOutput | Exception  # an exception ends its caller
HELD_SECONDS = 0.0005  # between steps while no request may have a row


class Mailboxes(Generic[Mailbox]):
    """The open requests of an engine, each with a mailbox, which its user makes and fills."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._failure: Exception | None = None

    def open(self, asked: Sequence[TokensAndParams], mailbox: Mailbox) -> list[Request]:
        """Enqueue all of them or none. Raises like `Engine.add_request`, and EngineError once the engine failed."""
        if self._failure is not None:
            raise _failed(self._failure)
        requests: list[Request] = []
        try:
            for token_ids, params, adapter in asked:
                requests.append(self._engine.add_request(token_ids, params, adapter=adapter))
        except BaseException:  # Ctrl-C, too: requests that were added must not stay
            self.close(requests)
            raise
        self._mailboxes.update((request.request_id, mailbox) for request in requests)
        return requests

    def close(self, requests: Sequence[Request]) -> None:
        """Abort requests that have not ended, which frees their blocks: their callers have gone."""
        for request in requests:
            self._mailboxes.pop(request.request_id, None)
            if self._failure is None:
                self._engine.abort(request.request_id)

    def has_work(self) -> bool:
        return self._failure is None and self._engine.has_work()

    def step(self) -> list[tuple[Mailbox, Item]]:
        """Run one step; returns what to put where. An engine that raises ends everything that is open."""
        num_steps = self._engine.num_steps
        try:
            outcome = self._engine.step()
        except Exception as error:  # noqa: BLE001 - whatever it was, no caller may wait forever
            return self.fail(error)
        if outcome.stats is None and self._engine.num_steps == num_steps:
            time.sleep(HELD_SECONDS)  # threads that make a grammar or read an adapter need the interpreter
        return [
            (self._mailboxes[request_id], output if output.error is None else EngineError(output.error))
            for output in outcome.outputs
            if (request_id := output.request.request_id) in self._mailboxes
        ]

    def fail(self, cause: Exception) -> list[tuple[Mailbox, Item]]:
        """Mark the engine as failed: it is not called again."""
        self._failure = cause
        return self.end_open(lambda: _failed(cause))

    def end_open(self, error: Callable[[], Exception]) -> list[tuple[Mailbox, Item]]:
        """End every open request with an error of its own; their callers still close them.

        One exception raised in several threads would mix their tracebacks.
        """
        items: list[tuple[Mailbox, Item]] = [(mailbox, error()) for mailbox in self._mailboxes.values()]
        self._mailboxes.clear()
        return items


def _failed(cause: Exception) -> EngineError:
    error = EngineError(f"the engine failed ({type(cause).__name__}: {cause})")
    error.__cause__ = cause
    return error
