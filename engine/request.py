"""The engine's data types for requests and their outputs.

Plain data without torch, clocks or I/O. `Scheduler` turns requests into a `StepPlan` (`engine/plan.py`), a runner
turns the plan into a `StepResult`; `Scheduler.update` applies it and reports `RequestOutput`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from math import inf, isfinite
from numbers import Integral, Real
from typing import NewType

from common.errors import InvalidRequestError
from kvstore.types import BlockId, BlockKey, HostSlot

RequestId = NewType("RequestId", str)
TokenId = int  # an alias, not a NewType: token lists come from tokenizers, protobuf and torch as plain ints

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 1024
MAX_BIASES = 1024
MAX_SPECULATIVE_TOKENS = 64
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "num_speculative_tokens")
_INTEGERS = ("max_tokens", "min_tokens", "top_k", *_OPTIONAL)
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
POOLINGS = ("last", "mean", "cls")  # see `engine.pooling.vectors`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample tokens. The sampling noise depends only on (seed, position).

    With `seed=None` the engine draws a seed when the request arrives. Raises InvalidRequestError.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off, as is -1, which becomes 0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # on generated tokens
    frequency_penalty: float = 0.0  # on generated tokens
    repetition_penalty: float = 1.0  # on prompt and generated tokens
    seed: int | None = None
    seed_is_drawn: bool = False  # by the server: no client can ask for the same answer again
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    grammar: str = ""  # that the output must follow, see `common.grammar.grammar`; the output ends with it
    logprobs: int | None = None  # number of alternatives; None: no logprobs
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None  # most drafts in a row; 0: none; None: the engine's setting
    pooling: str = ""  # returns a vector of the prompt instead of log-probabilities, see `engine.pooling`

    def __post_init__(self) -> None:
        def require(ok: bool, param: str, what: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{param} {what}", param)

        for names, exact, kind, what in ((_INTEGERS, int, Integral, "integer"), (_NUMBERS, float, Real, "number")):
            for name in names:
                value = getattr(self, name)
                if type(value) is exact or (value is None and name in _OPTIONAL):
                    continue
                ok = isinstance(value, kind) and not isinstance(value, bool)
                require(ok, name, f"must be {'an' if exact is int else 'a'} {what}, not {value!r}")
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"):
            require(isinstance(getattr(self, name), tuple | list), name, "must be a tuple")
        require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must be between 0 and max_tokens")
        require(0.0 <= self.temperature <= 100.0, "temperature", "must be between 0 and 100")
        require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        if self.top_k == -1:  # as older callers of vLLM write it
            object.__setattr__(self, "top_k", 0)
        require(self.top_k >= 0, "top_k", "must be 0 (off) or positive")
        require(0.0 <= self.min_p <= 1.0, "min_p", "must be between 0 and 1")
        require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        require(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "must be in (0, 10]")
        require(self.seed is None or 0 <= self.seed < 1 << 64, "seed", "must fit in 64 unsigned bits")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"must be between 0 and {MAX_LOGPROBS}")
        require(
            self.num_speculative_tokens is None or 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            "num_speculative_tokens", f"must be between 0 and {MAX_SPECULATIVE_TOKENS}",
        )  # fmt: skip
        require(self.pooling in ("", "auto", *POOLINGS), "pooling", f"must be auto, {', '.join(POOLINGS)}")
        require(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", "has too many entries")
        require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", "has too many entries")
        require(all(self.bad_words), "bad_words", "must not hold an empty sequence")
        require(len(self.logit_bias) <= MAX_BIASES, "logit_bias", "has too many entries")
        are_pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in self.logit_bias)
        are_finite = are_pairs and all(isinstance(bias, Real) and isfinite(bias) for _, bias in self.logit_bias)
        require(are_finite, "logit_bias", "must hold pairs of a token id and a finite number")

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled only among the likeliest."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def changes_logits(self) -> bool:
        """Whether the logits are changed before a token is sampled, beyond temperature and truncation."""
        return bool(
            self.allowed_token_ids
            or self.bad_words
            or self.grammar
            or (self.min_tokens and (self.stop_token_ids or not self.ignore_eos))
            or self.logit_bias
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
        )

    @property
    def reads_tokens(self) -> bool:
        """Whether the host must know all earlier tokens to decide which tokens are allowed next."""
        return bool(self.grammar) or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, *without* temperature and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that a proposer expects after the known ones.

    acceptance: for each token, the probability that it is accepted if the earlier drafts are.
    """

    token_ids: list[TokenId]
    acceptance: list[float]


class FinishReason(Enum):
    """Finish reason of a request; the values are OpenAI's where those exist."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    PREFILLED = "prefilled"  # prompt computed, first token sampled, blocks kept under a lease


class RequestStatus(Enum):
    WAITING = "waiting"  # owns no blocks
    AWAITING = "awaiting"  # owns no blocks; some blocks of its prompt are being prefetched
    LOADING = "loading"  # owns blocks that a transfer is filling
    RUNNING = "running"  # owns blocks and takes part in steps
    SWAPPED = "swapped"  # its KV is in host slots
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens, with the number of tokens whose KV is computed.

    `num_uncomputed_tokens` is the work left: a whole prompt, the rest of a chunked one, one token in decode, several
    in speculative decode. There is no other notion of phase.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0  # lower is served first
    arrival: int = 0  # order of arrival
    due: float = inf  # time.monotonic() when its next token is due; inf: no objective
    rank: tuple[float, ...] = ()  # in the order of service, given by the scheduling policy; no two are equal
    adapter: str = ""  # its KV is shared only with requests of the same adapter
    cache_salt: str = ""
    prefill_only: bool = False  # finish with PREFILLED after the first token and keep the blocks
    eos_token_ids: frozenset[int] = frozenset()

    max_output: int = 0  # most output tokens: `max_tokens`, or what the context has room for; set by the scheduler
    status: RequestStatus = RequestStatus.WAITING
    block_ids: list[BlockId] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)  # of the full blocks of known tokens
    host_slots: list[HostSlot] = field(default_factory=list)
    num_published_blocks: int = 0  # leading blocks that can be found by their keys
    num_planned_blocks: int = -1  # leading blocks that plans have contained; -1: the runner does not know the request
    num_computed_tokens: int = 0  # steps in flight included
    num_pending_tokens: int = 0  # maximum number that steps in flight sample; their values are not known yet
    num_cached_tokens: int = 0  # prompt tokens found in caches when it was first admitted
    num_prefetched_tokens: int = 0  # of these, pulled from a peer while it computed the prompt
    num_preemptions: int = 0
    kv_source: object | None = None  # reference to the prompt's KV at a peer; opaque to the scheduler
    num_source_tokens: int = 0  # number of prompt tokens whose KV the source has
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # collected until the first token
    num_draft_tokens: int = 0  # computed so far
    num_accepted_tokens: int = 0  # of these
    drafts: Drafts | None = None  # for the positions after the last known token
    is_ready: Callable[[], bool] | None = None  # false: no row yet, e.g. its grammar is being compiled

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The work left: `num_tokens - num_computed_tokens`."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return known + self.num_pending_tokens - self.num_computed_tokens

    def num_row_tokens(self, budget: int) -> int:
        """Return the number of tokens of the request's row in the next step, unless a wing has another rule."""
        return min(self.num_uncomputed_tokens, budget)

    @property
    def is_held(self) -> bool:
        """Whether the request gets no row in the next step."""
        return self.is_ready is not None and not self.is_ready()

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the hidden states of all prompt tokens are needed, which caches do not store."""
        params = self.params
        return (params.prompt_logprobs is not None or params.pooling in ("mean", "cls")) and not self.output_token_ids

    @property
    def num_reusable_tokens(self) -> int:
        """Number of tokens that may come from caches. The last one is computed: the step samples from its logits."""
        return 0 if self.needs_whole_prompt else self.num_tokens - 1

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the known tokens [start, stop) of prompt + output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]


@dataclass(slots=True)
class RequestOutput:
    """The output of one step for one request."""

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the end-of-sequence or stop token that ended the request
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Load of the scheduler, computed when asked for, and its counters since the start."""

    num_preemptions: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_swapped: int
    num_loading: int
    waiting_prefill_tokens: int
    waiting_prefill_pairs: int  # of these tokens, each with every earlier token
    context_tokens: int  # of decoding requests
