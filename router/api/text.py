"""Turns the tokens of a choice into text with logprobs and finish reason, and collects it.

Takes workers' deltas, returns updates for sinks. Knows nothing of workers, HTTP or JSON. A migration does not change
its state: each token comes here once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from common.errors import EngineError
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb

if TYPE_CHECKING:
    from common.tools.call_deltas import DeltaToolCall

DEADLINE = "deadline"  # a stop reason
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Update:
    """New text and tokens of a choice. Without finish_reason the choice continues."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[pb.TokenLogprobs] = ()
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id that the client gave; or DEADLINE
    tool_calls: Sequence[DeltaToolCall] = ()
    reasoning: str = ""


@dataclass(slots=True)
class ChoiceResult:
    """The merged updates of one choice."""

    index: int
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    tool_calls: list[DeltaToolCall] = field(default_factory=list)
    reasoning_pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, update: Update) -> None:
        self.pieces.append(update.text)
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        self.tool_calls += update.tool_calls
        self.reasoning_pieces.append(update.reasoning)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces)


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class TextEnd(Protocol):
    """Ends one choice depending on its text, such as `router/stop_strings`."""

    def push(self, detokenizer: Detokenizer, token_ids: list[int], num_before: int, update: Update) -> None:
        """Set the update's text from token_ids, after `num_before` tokens, and its end if the text ends here."""


NewTextEnd = Callable[[], TextEnd]


@dataclass(frozen=True, slots=True)
class TextRules:
    """How to turn a choice into text, and where to stop besides the criteria that workers check."""

    continues: bool = False  # the text continues the prompt's
    skip_special: bool = True
    has_logprobs: bool = True
    new_end: NewTextEnd | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    shows_stop_token: bool = False
    shows_nothing: bool = False  # max_tokens 0: drop the one token that workers always generate


class ChoiceText:
    """The text of one choice. `push` until an update has a finish_reason."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: TextRules,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """shown: special tokens whose texts are kept even with skip_special."""
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._rules = rules
        self._end = rules.new_end() if rules.new_end else None
        # Whether tokens only become text.
        self._is_plain = not (self._end or rules.has_logprobs or rules.shows_nothing)
        self._detokenizer = tokenizer.detokenizer(rules.skip_special, rules.continues, shown)

    def push(self, token_ids: list[int], delta: pb.TokenDelta) -> Update:
        """Take a delta. token_ids: its tokens; the update keeps the list. Raises EngineError if the worker has ended
        the choice with a reason that clients do not know."""
        if self._is_plain and not delta.finish_reason:  # almost every token
            self.num_tokens += len(token_ids)
            return Update(self._detokenizer.push(token_ids), token_ids)
        update = Update("", token_ids, delta.logprobs, delta.prompt_logprobs)
        ended = delta.finish_reason not in (pb.FINISH_REASON_NONE, pb.FINISH_REASON_PREFILLED)
        if ended:
            reason = _FINISH_REASONS.get(delta.finish_reason)
            if reason is None:
                raise EngineError("the worker cancelled the request")
            update.finish_reason = reason
        if self._rules.shows_nothing:
            return Update("", [], (), update.prompt_logprobs, "length" if ended or token_ids else None)
        shown = self._shown_tokens(delta, token_ids, update) if ended else token_ids
        if self._end is not None:
            self._end.push(self._detokenizer, shown, self.num_tokens, update)
        else:
            update.text = self._detokenizer.push(shown)
            if ended:
                update.text += self._detokenizer.finish()
        self.num_tokens += len(update.token_ids)
        return update

    def cut(self) -> Update:
        """End the choice, because its deadline is exceeded, with the text that was held back."""
        update = self.push([], pb.TokenDelta(finish_reason=pb.FINISH_REASON_LENGTH))
        if update.finish_reason == "length":  # else the text that was held back completed a stop string
            update.stop_reason = DEADLINE
        return update

    def _shown_tokens(self, last: pb.TokenDelta, token_ids: list[int], update: Update) -> list[int]:
        """Drop the stop token at the end, unless the client wants to see it."""
        if not last.HasField("stop_token_id"):
            return token_ids
        stop_id = last.stop_token_id
        if stop_id in self._rules.stop_token_ids:
            update.stop_reason = stop_id
            if self._rules.shows_stop_token:
                return token_ids
        return token_ids[:-1] if token_ids and token_ids[-1] == stop_id else token_ids
