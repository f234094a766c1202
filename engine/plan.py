"""The plan of a step and its result, as plain data that can be encoded and executed elsewhere.

The scheduler makes a `StepPlan`, a runner turns it into a `StepResult`. A runner keeps the state of each request
between plans (`engine/request_states.py`), so a plan contains only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.pairs import num_pairs
from engine.request import Drafts, RequestId, SamplingParams, TokenId, TokenLogprobs
from kvstore.types import BlockId, HostSlot


class NewRequest(msgspec.Struct, gc=False):
    """Data of a request that a runner needs before its first row. Its blocks are in its rows."""

    request_id: RequestId
    token_ids: list[TokenId]  # prompt, then the known output tokens
    num_prompt_tokens: int
    params: SamplingParams
    eos_token_ids: frozenset[TokenId] = frozenset()
    prefill_only: bool = False  # it ends with the first token after its prompt
    adapter: str = ""  # that its rows are computed with; empty: none
    cache_salt: str = ""  # requests with another salt must learn nothing of its text


class ScheduledRow(msgspec.Struct, gc=False):
    """One request's share of a step: compute tokens [start, start + num_tokens), then sample if `samples`.

    A row with drafts computes the last known token and the drafts, and samples after each of these tokens.
    """

    request_id: RequestId
    start: int  # number of the request's tokens in the KV cache when the step begins
    num_tokens: int  # drafts included
    samples: bool  # the row reaches the last known token, so the step samples the next one
    new_block_ids: tuple[BlockId, ...] = ()  # blocks since the request's previous row; mostly the shared empty tuple
    draft_token_ids: tuple[TokenId, ...] = ()  # proposed for the positions that follow the last known token

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether the row computes one known token, followed by drafts if there are any."""
        return self.num_tokens == 1 or bool(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The quantities that the duration of a step depends on, see common/step_times.py."""

    num_decode_tokens: int = 0  # drafts included
    num_prompt_tokens: int = 0
    context: int = 0  # tokens of KV that decode rows read
    pairs: int = 0  # of a prompt token with each earlier token

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow]) -> StepSize:
        num_decodes = num_prompts = context = 0
        pairs = 0.0
        for row in rows:  # runs for every step: one loop without properties
            num_tokens = row.num_tokens
            if num_tokens == 1 or row.draft_token_ids:
                num_decodes += num_tokens
                context += row.start + num_tokens
            else:
                num_prompts += num_tokens
                pairs += num_pairs(row.start, num_tokens)
        return cls(num_decodes, num_prompts, context, round(pairs))


class PlacedExperts(msgspec.Struct, gc=False):
    """A layer's new placement of experts, see `engine/expert_balancing/placement.py`."""

    index: int  # of the layer, among the layers with experts
    slots: tuple[int, ...]


class StepPlan(msgspec.Struct, gc=False):
    """All that one step does, in this order: forget `finished`, add `new`, place experts, copy out, copy in, run the
    forward pass.

    Decode rows (`is_decode`) come first, so that a runner can split the batch by slicing.
    """

    new: list[NewRequest] = msgspec.field(default_factory=list)
    rows: list[ScheduledRow] = msgspec.field(default_factory=list)
    finished: list[RequestId] = msgspec.field(default_factory=list)
    copies_out: list[tuple[BlockId, HostSlot]] = msgspec.field(default_factory=list)
    copies_in: list[tuple[HostSlot, BlockId]] = msgspec.field(default_factory=list)
    placed: PlacedExperts | None = None


@dataclass(slots=True)
class StepResult:
    """Result of a step. All lists have one entry per row of the plan.

    token_ids: sampled tokens; none for rows that do not sample, else the accepted drafts and the token after them.
    logprobs: one entry per sampled token if the request asks for them, else empty.
    prompt_logprobs: entries for those positions of start + 1 .. start + num_tokens that are in the prompt.
    errors: row index -> message. Such a row has no tokens, and only its request fails.
    drafts: row index -> drafts for the positions after the row's tokens.
    seconds: the step's duration by the device's clock; 0: unknown.
    """

    token_ids: list[list[TokenId]]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[list[TokenLogprobs]]
    errors: dict[int, str] = field(default_factory=dict)
    drafts: dict[int, Drafts] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of_rows(cls, num_rows: int) -> StepResult:
        """Return an empty result for `num_rows` rows."""
        return cls([[] for _ in range(num_rows)], [[] for _ in range(num_rows)], [[] for _ in range(num_rows)])

    def put(self, indices: Sequence[int], part: StepResult) -> None:
        """Copy the results of some rows from `part`. indices: of the part's rows in this result."""
        for part_index, index in enumerate(indices):
            self.token_ids[index] = part.token_ids[part_index]
            self.logprobs[index] = part.logprobs[part_index]
            self.prompt_logprobs[index] = part.prompt_logprobs[part_index]
            if part_index in part.errors:
                self.errors[index] = part.errors[part_index]
            if part_index in part.drafts:
                self.drafts[index] = part.drafts[part_index]


class PendingStep(Protocol):
    """A step that a runner has launched."""

    def result(self) -> StepResult:
        """Wait until the step has ended. Called once, in the order of the launches."""
        ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A pending step whose result is already known."""

    found: StepResult

    def result(self) -> StepResult:
        return self.found
