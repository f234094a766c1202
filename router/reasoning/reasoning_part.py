"""Reasoning as a part of chat answers: taken out of the text, and shown in the JSON of messages."""

from __future__ import annotations

from typing import Any

from common.grammar import grammar
from common.reasoning.reasoning_format import ReasoningFormat, lark_before_answer, reasoning_format
from common.reasoning.reasoning_parser import ReasoningParser, is_opened, parser_for
from common.text.tokenizer import Tokenizer
from router.api.message_schemas import Body
from router.api.results import ChoiceResult
from router.api.text import Update

NUM_END_TOKENS = 16  # of a prompt, in which its template may have opened the reasoning


class ReasoningFields(Body):
    """Fields of a chat request's body."""

    include_reasoning: bool | None = None


class ReasoningPart:
    """The reasoning in the answers to one request."""

    def __init__(self, written: ReasoningFormat, tokenizer: Tokenizer, is_included: bool, has_tools: bool) -> None:
        self._written = written
        self._has_tools = has_tools
        self._tokenizer = tokenizer
        self._is_included = is_included
        ids = {text: tokenizer.special_id_of.get(text) for text in written.markers}
        self._special = {text: token_id for text, token_id in ids.items() if token_id is not None}
        self.shown = frozenset(self._special.values())

    def grammar(self, answer: str, prompt_token_ids: list[int]) -> str:
        """Return the grammar of an answer with its reasoning before it."""
        prompt_end = self._prompt_end(prompt_token_ids)
        if not answer or prompt_end.rstrip().endswith(self._written.end):
            return answer
        is_open = is_opened(self._written, prompt_end)
        return grammar.after(lark_before_answer(self._written, is_open, self._special), answer)

    def stage(self, prompt_token_ids: list[int]) -> ReasoningStage:
        return ReasoningStage(parser_for(self._written, self._prompt_end(prompt_token_ids), self._has_tools))

    def delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        return self._fields(update.reasoning) if update.reasoning else {}

    def message(self, result: ChoiceResult) -> dict[str, Any]:
        return self._fields(result.reasoning or None)

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        return reason

    def _fields(self, text: str | None) -> dict[str, Any]:
        """DeepSeek's name of the field, and the one of vLLM and OpenRouter."""
        return {"reasoning_content": text, "reasoning": text} if self._is_included else {}

    def _prompt_end(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids[-NUM_END_TOKENS:], skip_special=False)


class ReasoningStage:
    """Takes the reasoning out of the text of one choice."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser

    def take(self, update: Update) -> None:
        update.reasoning, update.text = self._parser.push(update.text)
        if update.finish_reason is not None:
            reasoning, text = self._parser.finish()
            update.reasoning += reasoning
            update.text += text


def reasoning_part(body: Body, tokenizer: Tokenizer, has_tools: bool, parser: str) -> ReasoningPart | None:
    """Return the part for a request; None for a model that does not reason apart from its answers.

    has_tools: a later part takes calls out of the answers.
    """
    written = reasoning_format(tokenizer.tool_template, parser)
    if written is None or not isinstance(body, ReasoningFields):
        return None
    return ReasoningPart(written, tokenizer, body.include_reasoning is not False, has_tools)
