"""Shares of a pipeline's steps: which of the requests that decode are in the next one. Pure, as the scheduler."""

from __future__ import annotations

from operator import attrgetter

from engine.request import Request
from engine.scheduled_step import ScheduledStep

_last_step = attrgetter("last_step")


class StageShares:
    """Divides requests among as many steps as there are stages, which run at the same time."""

    def __init__(self, num_stages: int, follows_pending: bool = False) -> None:
        """follows_pending: a row may follow a token that the host does not know, of as many steps before."""
        self.num_stages = num_stages
        self._follows_pending = follows_pending
        self._num_steps = 0  # that have rows

    def advance(self, step: ScheduledStep) -> None:
        """Count a step that is to be launched."""
        self._num_steps += bool(step.rows)
        for request in step.rows:
            request.last_step = self._num_steps

    def next_share(self, decodes: list[Request]) -> list[Request]:
        """Select an equal share, of those requests whose last token the next step will have.

        Shares of as many steps as there are stages are all requests, so each is in one step of each round.
        """
        share, rest = divmod(len(decodes), self.num_stages)
        share = max(share + (self._num_steps % self.num_stages < rest), 1)
        ready = [request for request in decodes if not request.num_pending_tokens or self._can_follow(request)]
        ready.sort(key=_last_step)  # who has waited longest first, else in the order of service
        return ready[:share]

    def _can_follow(self, request: Request) -> bool:
        """Whether the last stage samples the pending token of `request` before the first one needs it.

        Where the host must know all tokens, the request waits for them instead of the whole pipeline.
        """
        num_steps_before = self._num_steps + 1 - request.last_step
        return self._follows_pending and num_steps_before >= self.num_stages and not request.params.reads_tokens
