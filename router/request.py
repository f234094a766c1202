"""One client's request: starts its choices and pushes their updates to one sink.

When the deadline is exceeded, choices end with their text so far
(docs/decisions/deadlines-admission-and-migration.md).
"""

from __future__ import annotations

from typing import Protocol

from common.errors import DeadlineExceededError
from router.api.text import Update, Usage
from router.choice import Choice, State
from router.metrics import RouterMetrics


class Sink(Protocol):
    """Destination of an answer. Called while a worker's report is handled, so its methods must not block."""

    def on_update(self, index: int, update: Update) -> None:
        """Take an update of choice `index`. One with a finish reason is the last."""

    def on_failure(self, error: Exception) -> None:
        """Take the request's failure; no update follows."""


class GenerationRequest:
    """All choices of a request, here one for each prompt; `router/several_choices` has others.

    Call `start` once, and `close` in any case.
    """

    def __init__(self, request_id: str, choices: list[Choice], metrics: RouterMetrics) -> None:
        self.request_id = request_id
        self.choices = choices
        self._metrics = metrics
        self._sink: Sink

    def start(self, sink: Sink) -> None:
        self._sink = sink
        for choice in self.leaders:
            if choice.state is State.NEW:  # else the failure of another one has cancelled it
                choice.start(self)

    def close(self) -> None:
        """Cancel open choices, and drop references, which form cycles."""
        self._cancel()
        if self.choices:
            longest = max(len(choice.journal.output_token_ids) for choice in self.choices)
            self._metrics.longest_output.observe(longest)
        self.choices.clear()
        del self._sink

    @property
    def leaders(self) -> list[Choice]:
        """The first choice of each prompt."""
        return self.choices

    @property
    def is_waiting_for_worker(self) -> bool:
        return any(choice.state is State.WAITING for choice in self.choices)

    def usage(self) -> Usage:
        """Count the tokens so far. A prompt counts once, however many choices it has."""
        return Usage(
            prompt_tokens=sum(len(choice.journal.prompt_token_ids) for choice in self.leaders),
            completion_tokens=sum(choice.text.num_tokens for choice in self.choices),
            reasoning_tokens=sum(choice.text.num_reasoning_tokens for choice in self.choices),
            cached_tokens=sum(choice.journal.num_cached_tokens for choice in self.leaders),
        )

    # -- calls of choices --------------------------------------------------------------------------------------

    def on_update(self, choice: Choice, update: Update) -> None:
        self._sink.on_update(choice.index, update)

    def on_failure(self, choice: Choice, error: Exception) -> None:
        if isinstance(error, DeadlineExceededError) and any(each.journal.has_started for each in self.choices):
            try:
                self.on_update(choice, choice.text.cut())
                return
            except Exception as bug:  # noqa: BLE001 - reported as a failure: callbacks would swallow it
                error = bug
        self._sink.on_failure(error)
        self._cancel()

    def _cancel(self) -> None:
        for choice in self.choices:
            choice.cancel()
