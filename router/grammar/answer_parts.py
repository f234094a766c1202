"""Parts of chat answers besides content: how they are taken out of the text and put into the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from common.text.tokenizer import Tokenizer
from protos import types_pb2 as pb
from router.api.render import ChatRenderer, RenderOptions
from router.api.text import ChoiceResult, ChoiceText, Update, Usage

_NO_END = pb.TokenDelta()


class TextStage(Protocol):
    """Takes a part out of a choice's text."""

    def take(self, update: Update) -> None:
        """Change an update: move the stage's part out of its text. An update with a finish reason is the last."""


class AnswerPart(Protocol):
    """What a feature takes out of answers' texts, and where it puts that in the JSON of a chat message.

    For example tool calls (`router/tools/tool_part.py`). Each request that asks for a part has its own instance.
    """

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose text the stage has to see; content never shows them."""

    def grammar(self, answer: str, prompt_token_ids: list[int]) -> str:
        """Return the grammar of texts with this part, whose content follows `answer`; empty: any text."""

    def stage(self, prompt_token_ids: list[int]) -> TextStage:
        """Return a stage that takes this part out of the text of one choice."""

    def delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        """Return this part's fields in a chunk of choice `index`; empty if nothing is new."""

    def message(self, result: ChoiceResult) -> dict[str, Any]:
        """Return this part's fields in the message of an answer that is not streamed."""

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Return the finish reason for clients, given the `reason` of workers for choice `index`."""


class PartsRenderer(ChatRenderer):
    """Renders chat answers with these parts."""

    _first_content = None  # no content before the first: there may be other parts alone

    def __init__(self, options: RenderOptions, tokenizer: Tokenizer, parts: Sequence[AnswerPart]) -> None:
        super().__init__(options, tokenizer)
        self._parts = parts

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        is_plain = self._plain is not None and update.finish_reason is None
        if not is_plain or not (update.tool_calls or update.reasoning):
            return super().chunk(index, update, usage)
        delta = self._delta(index, update)
        return self._full_chunk(index, update, delta, usage) if delta else b""  # a part that the client does not want

    def _delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": update.text} if update.text else {}
        for part in self._parts:
            delta |= part.delta(index, update)
        return delta

    def _message(self, result: ChoiceResult) -> dict[str, Any]:
        message = super()._message(result)
        for part in self._parts:
            message |= part.message(result)
        return message

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        for part in self._parts:
            reason = part.finish_reason(index, reason)
        return reason


class StagedText(ChoiceText):
    """The text of one choice; stages take their parts out of it, in this order."""

    stages: Sequence[TextStage] = ()

    def push(self, token_ids: list[int], delta: pb.TokenDelta) -> Update:
        """See ChoiceText."""
        if len(token_ids) < 2:
            return self._push(token_ids, delta)
        whole = Update("", [], (), delta.prompt_logprobs)  # drafts: a stage may end the choice at any of the tokens
        for token_id in token_ids[:-1]:
            _extend(whole, self._push([token_id], _NO_END))
            if whole.finish_reason is not None:
                break
        else:
            _extend(whole, self._push(token_ids[-1:], delta))
        whole.logprobs = delta.logprobs[: len(whole.token_ids)]
        return whole

    def _push(self, token_ids: list[int], delta: pb.TokenDelta) -> Update:
        update = super().push(token_ids, delta)
        for stage in self.stages:
            stage.take(update)
        if update.reasoning:
            self.num_reasoning_tokens += len(update.token_ids)
        return update


def _extend(update: Update, later: Update) -> None:
    """Append an update that follows, except for log-probabilities."""
    update.text += later.text
    update.token_ids += later.token_ids
    update.finish_reason, update.stop_reason = later.finish_reason, later.stop_reason
    update.tool_calls = [*update.tool_calls, *later.tool_calls]
    update.reasoning += later.reasoning
