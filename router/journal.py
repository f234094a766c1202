"""Journal of one choice, from which another worker can continue it, and the placement of a choice on workers.

Plain data and pure methods. A worker gets prompt and tokens so far; the noise of sampling is a function of
(seed, position), so it continues with the same tokens as the lost worker would have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from common.token_ids import pack_ids
from kvstore.types import WorkerId
from protos import types_pb2 as pb

# Events of a choice, besides the beginning of a leg, which is named by the state: "prefill" or "decode".
FIRST_OUTPUT = "first output"
WAITING = "waiting for a decode worker"
MOVED = "moved"
DEADLINE_EXCEEDED = "deadline exceeded"


class Event(NamedTuple):
    """An event of a choice, for /explain and for traces."""

    time: float
    what: str
    num_output_tokens: int  # of the choice at that time
    worker: str = ""  # the worker whose leg begins or has its first output
    times: pb.RequestTimes | None = None  # the worker's measurements, with its first output
    reason: str = ""  # why the choice moves


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers that serve a request. `prefill` None: the decode worker computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None
    cached_tokens: int  # prompt tokens in the cache of the worker that computes the prompt

    @property
    def kind(self) -> str:
        """Name of the placement for metrics and /explain."""
        return "disaggregated" if self.prefill is not None else "local"


@dataclass(slots=True, eq=False)
class Journal:
    """One choice, from admission to its end. Times are time.monotonic(), as uvloop's clock has only milliseconds."""

    choice_id: str
    prompt_token_ids: list[int]
    packed_prompt: bytes = field(init=False)
    sampling: pb.SamplingParams
    deadline: float
    arrival: float
    request: pb.Submit = field(default_factory=pb.Submit)  # fields for the Submit of every leg of every choice
    session: str = ""

    output_token_ids: list[int] = field(default_factory=list)
    kv_handle: pb.KvHandle | None = None  # handle on the prompt's KV, until a decode worker has read it
    num_legs: int = 0
    num_migrations: int = 0
    num_moves: int = 0
    num_failures_in_row: int = 0  # failures without a token between them
    num_tokens_before: int = 0  # output tokens at the last failure
    first_token_time: float = 0.0
    num_draft_tokens: int = 0  # of legs that have ended
    num_accepted_tokens: int = 0
    first_times: pb.RequestTimes | None = None  # measurements of the worker that computed the prompt first
    last_token_time: float = 0.0
    events: list[Event] = field(default_factory=list)  # in order of time
    outcome: str = "abort"  # stop, length, refused or error; abort if cancelled, and while it is open

    def __post_init__(self) -> None:
        self.packed_prompt = pack_ids(self.prompt_token_ids)

    def note(
        self, now: float, what: str, *, worker: str = "", times: pb.RequestTimes | None = None, reason: str = ""
    ) -> None:
        self.events.append(Event(now, what, len(self.output_token_ids), worker, times, reason))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in the cache of the worker that computed the prompt first."""
        return 0 if self.first_times is None else min(self.first_times.num_cached_tokens, len(self.prompt_token_ids))

    @property
    def has_started(self) -> bool:
        return bool(self.output_token_ids)

    def leg_failed(self) -> None:
        """Count failures without a token in between: a choice that kills its workers must not be retried forever."""
        if len(self.output_token_ids) > self.num_tokens_before:
            self.num_failures_in_row = 0
        self.num_failures_in_row += 1
        self.num_tokens_before = len(self.output_token_ids)

    def next_submit(self, now: float) -> pb.Submit:
        """Return the message that makes a worker continue from here. Its request_id is new for each leg, so that late
        messages of a lost worker match no leg."""
        self.num_legs += 1
        submit = pb.Submit(
            request_id=f"{self.choice_id}.{self.num_legs}",
            prompt_token_ids=self.packed_prompt,
            output_token_ids=self.output_token_ids,
            sampling=self.sampling,
            kv_handle=self.kv_handle,
            deadline_seconds=max(self.deadline - now, 0.001),
        )
        submit.MergeFrom(self.request)
        if self.has_started:
            submit.sampling.ClearField("prompt_logprobs")  # they came with the first token
        return submit
