"""One worker's part of a choice: a prefill leg computes its prompt, a decode leg its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.errors import MiniInferError
from protos import types_pb2 as pb

if TYPE_CHECKING:
    from router.workers.worker_link import WorkerLink


class LegListener(Protocol):
    """The choice, as the link sees it. No method may raise: the link carries everybody's legs."""

    def on_delta(self, leg: Leg, delta: pb.TokenDelta, now: float) -> None:
        """Take what one step of the worker gave the choice. With a finish reason it is the last delta."""

    def on_failure(self, error: MiniInferError) -> None:
        """Handle the end of the leg without a finish reason."""


@dataclass(slots=True, eq=False)
class Leg:
    """Open from `WorkerLink.submit` to the worker's last delta or `WorkerLink.close`; has a listener that long."""

    leg_id: str
    link: WorkerLink
    listener: LegListener
    num_prompt_tokens: int
    pending_tokens: int  # prompt tokens that count as queued on the worker until its first delta
    next_link: WorkerLink | None  # where the choice goes on after this leg: it counts as waiting there
    decodes: bool  # a row of the worker's steps, soon if not now
    opened: float = 0.0  # when
    late_until: float = 0.0  # its prompt comes too late anyway and lets others go first until then; 0: not so
    num_offered_tokens: int = 0  # prompt tokens whose KV the next worker could prefetch while this one computed
    times: pb.RequestTimes | None = None  # what the worker measured until the first delta; None before it
    first_time: float = 0.0  # when the first delta came
    num_tokens_at_first: int = 0  # output tokens of the choice then
