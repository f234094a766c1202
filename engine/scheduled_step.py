"""A step in the engine: the plan for the runner, the live requests of its rows, and the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.plan import NewRequest, ScheduledRow, StepPlan, StepSize
from engine.request import Request, RequestId, RequestOutput, RequestStatus
from kvstore.types import BlockId, BlockKey, HostSlot


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Blocks to be pulled from a peer, and their destinations.

    Fill `block_ids[i]` with block `positions[i]` of `source`, then call `Engine.finish_load`. Without positions there
    is nothing to fill or report: release the source.
    """

    owner: Request | None  # the request that waits for the blocks; None: a prefetch into the prefix cache
    source: object
    positions: Sequence[int]
    block_ids: Sequence[BlockId]
    num_tokens: int  # whose KV is loaded
    block_keys: Sequence[BlockKey] = ()  # of the blocks, for the prefix cache


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A step that the scheduler fills in the order of its decisions; `seal` turns it into the plan."""

    rows: dict[Request, ScheduledRow] = field(default_factory=dict)  # in the plan's order once it is sealed
    copies_out: list[tuple[BlockId, HostSlot]] = field(default_factory=list)
    copies_in: list[tuple[HostSlot, BlockId]] = field(default_factory=list)
    offload_slots: list[HostSlot] = field(default_factory=list)  # the slots of copies_out that become host cache
    plan: StepPlan = field(default_factory=StepPlan)
    ended: list[Request] = field(default_factory=list)  # while the step runs; it frees their blocks at its end
    freed: list[Sequence[BlockId]] = field(default_factory=list)  # blocks that steps up to this one may still use

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows.values())

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.copies_out or self.copies_in)

    def add_row(self, request: Request, num_tokens: int, is_last: bool = False) -> None:
        """Add a row for the next tokens of `request`. It samples if none are left; `is_last`: known to be so."""
        samples = is_last or num_tokens == request.num_uncomputed_tokens
        self.rows[request] = ScheduledRow(request.request_id, request.num_computed_tokens, num_tokens, samples)

    def seal(self, finished: list[RequestId]) -> None:
        """Make the plan, and record what the runner knows with it. `finished`: ids that the runner forgets first."""
        if any(row.num_tokens > 1 for row in self.rows.values()):  # decode rows first; the sort is stable
            self.rows = dict(sorted(self.rows.items(), key=lambda item: not item[1].is_decode))
        plan = self.plan = StepPlan([], list(self.rows.values()), finished, self.copies_out, self.copies_in)
        for request, row in self.rows.items():
            num_planned = request.num_planned_blocks
            if num_planned < 0:
                plan.new.append(_new_request(request))
                num_planned = 0
            num_blocks = len(request.block_ids)
            if num_blocks > num_planned:
                row.new_block_ids = tuple(request.block_ids[num_planned:])
                num_planned = num_blocks
            request.num_planned_blocks = num_planned

    def drop_ended(self) -> None:
        """Remove the rows of requests that are no longer running."""
        ended = [request for request in self.rows if request.status is not RequestStatus.RUNNING]
        for request in ended:
            del self.rows[request]
        if ended:
            self.plan.rows = list(self.rows.values())


@dataclass(frozen=True, slots=True)
class StepStats:
    """Size and duration of a step. With others in flight, it is measured from the end of the previous step."""

    size: StepSize = field(default_factory=StepSize)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A prompt chunk, not the last one, whose step has ended: KV of the first `num_tokens` is computed."""

    request: Request
    num_tokens: int


@dataclass(slots=True)
class StepOutcome:
    """The outcome of one call of `Engine.step`: the step that it planned, and the results of steps that ended.

    outputs: one for each row that sampled or failed. prompt_chunks: computed ones of prompts for peers.
    loads: KV to be pulled into blocks that are reserved, each to be reported with `Engine.finish_load`, without the
        loads that `Engine.step` has started.
    stats: of the last step that ended; None: no step has ended.
    """

    plan: StepPlan
    outputs: list[RequestOutput] = field(default_factory=list)
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)
    stats: StepStats | None = None


def _new_request(request: Request) -> NewRequest:
    return NewRequest(
        request.request_id,
        request.prompt_token_ids + request.output_token_ids,
        request.num_prompt_tokens,
        request.params,
        request.eos_token_ids,
        request.prefill_only,
        request.adapter,
        request.cache_salt,
    )
