"""Reasoning as a part of chat answers: taken out of the text, and put into the JSON of messages."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.reasoning.reasoning_format import (
    Budget,
    ReasoningFormat,
    lark_after_budget,
    lark_before_answer,
    marks,
    reasoning_format,
)
from common.reasoning.reasoning_parser import ReasoningParser, is_opened, parser_for
from common.text.tokenizer import Tokenizer
from router.api.schemas import Body, Label
from router.api.text import ChoiceResult, Update
from router.template_options.fields import TemplateFields

NUM_END_TOKENS = 16  # end of a prompt where its template may have opened the reasoning


# Names in templates: of Qwen3 and GLM; of DeepSeek-V3.1 and Granite; of Seed-OSS.
NO_THINKING: dict[str, Any] = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}
_ASKING = frozenset({"reasoning", "thinking_token_budget", "reasoning_effort"})
NumTokens = Annotated[int, Field(ge=0, lt=1 << 31)]


class ReasoningOptions(Body):
    """Reasoning options with OpenRouter's names."""

    effort: Label | None = None
    enabled: bool | None = None
    max_tokens: NumTokens | None = None
    exclude: bool | None = None


class ReasoningFields(Body):
    """Fields of a chat request's body about reasoning."""

    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # -1: not bounded
    reasoning: ReasoningOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _tell_template(cls, fields: Any) -> Any:
        """Pass the effort and the budget to the chat template."""
        if not isinstance(fields, dict):
            return fields
        options = fields.get("reasoning")
        if isinstance(options, dict) and fields.get("reasoning_effort") is None:
            effort = "none" if options.get("enabled") is False else options.get("effort")
            fields = {**fields, "reasoning_effort": effort}
        variables, given = _template_variables(fields), fields.get("chat_template_kwargs")
        if not variables or not isinstance(given, dict | None):
            return fields
        return {**fields, "chat_template_kwargs": variables | (given or {})}

    @model_validator(mode="after")
    def _check_budget(self) -> ReasoningFields:
        if self.thinking_token_budget is not None and self.reasoning and self.reasoning.max_tokens is not None:
            message = "thinking_token_budget and reasoning.max_tokens exclude each other"
            raise InvalidRequestError(message, "thinking_token_budget")
        return self

    @property
    def is_reasoning_included(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def budget(self) -> int | None:
        """Tokens that a choice may use for reasoning; None: no limit."""
        if self.thinking_token_budget is not None:
            return None if self.thinking_token_budget == -1 else self.thinking_token_budget
        return self.reasoning.max_tokens if self.reasoning else None

    @property
    def effort_field(self) -> str:
        """The field that may have asked for an effort."""
        if self.reasoning is None:
            return "reasoning_effort"
        return "reasoning.enabled" if self.reasoning.enabled is False else "reasoning.effort"


def _template_variables(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a body's fields imply."""
    options = fields.get("reasoning")
    budget = fields.get("thinking_token_budget")
    if budget is None and isinstance(options, dict):
        budget = options.get("max_tokens")
    if budget == 0 or fields.get("reasoning_effort") == "none":
        return NO_THINKING
    return {} if budget in (None, -1) else {"thinking_budget": budget}


class ReasoningPart:
    """The reasoning in the answers to one request."""

    def __init__(
        self, written: ReasoningFormat, tokenizer: Tokenizer, is_included: bool, has_tools: bool, budget: int | None
    ) -> None:
        """budget: reasoning tokens of a choice. Raises InvalidRequestError if given where markers are no tokens."""
        self._written = written
        self._has_tools = has_tools
        self._tokenizer = tokenizer
        self._is_included = is_included
        ids = {text: tokenizer.special_id_of.get(text) for text in written.markers}
        self._special = {text: token_id for text, token_id in ids.items() if token_id is not None}
        self.shown = frozenset(self._special.values())
        self._budget: Budget | None = None
        if budget is not None:
            self._special = marker_ids(written, tokenizer)
            self._budget = budget, frozenset(self._special.values()).union(tokenizer.eos_token_ids)

    @property
    def never_reasons(self) -> bool:
        return self._budget is not None and self._budget[0] == 0

    def grammar(self, answer: str, prompt_token_ids: list[int]) -> str:
        """Return the grammar of an answer with the reasoning before it."""
        prompt_end = self._prompt_end(prompt_token_ids)
        if prompt_end.rstrip().endswith(self._written.end) or not (answer or self._budget):
            return answer
        is_open = is_opened(self._written, prompt_end)
        if self._budget:
            before, any_answer = lark_after_budget(self._written, is_open, self._special, self._budget)
            if not answer:
                return grammar.after(before, grammar.lark(any_answer))
        has_header = self._has_tools  # the grammar of calls has it then
        before = lark_before_answer(self._written, is_open, self._special, self._budget, has_header)
        return grammar.after(before, answer, marks(self._written, is_open, has_header))

    def stage(self, prompt_token_ids: list[int]) -> ReasoningStage:
        return ReasoningStage(parser_for(self._written, self._prompt_end(prompt_token_ids), self._has_tools))

    def delta(self, index: int, update: Update | ChoiceResult) -> dict[str, Any]:
        return self._fields(update.reasoning) if update.reasoning else {}

    def message(self, result: ChoiceResult) -> dict[str, Any]:
        return self._fields(result.reasoning or None)

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        return reason

    def _fields(self, text: str | None) -> dict[str, Any]:
        """Return the field under DeepSeek's name and under the one of vLLM and OpenRouter."""
        return {"reasoning_content": text, "reasoning": text} if self._is_included else {}

    def _prompt_end(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids[-NUM_END_TOKENS:], skip_special=False)


class ReasoningStage:
    """Takes the reasoning out of one choice's text."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._parser = parser

    def take(self, update: Update) -> None:
        update.reasoning, update.text = self._parser.push(update.text)
        if update.finish_reason is not None:
            reasoning, text = self._parser.finish()
            update.reasoning += reasoning
            update.text += text


def reasoning_part(body: Body, tokenizer: Tokenizer, has_tools: bool, parser: str) -> ReasoningPart | None:
    """Return the part for a request; None if the model's reasoning is not separate from its answers.

    has_tools: a later part takes tool calls out of the answers.
    """
    written = reasoning_format(tokenizer.tool_template, parser)
    if not isinstance(body, ReasoningFields):
        return None
    budget = body.budget
    if written is None:
        if budget is not None:
            message = "this model does not reason apart from its answers: its reasoning cannot be bounded"
            raise InvalidRequestError(message, "thinking_token_budget")
        return None
    if budget is None and isinstance(body, TemplateFields) and body.reasoning_effort == "none":
        budget = 0 if _are_tokens(written, tokenizer) else None  # for templates that ignore the effort
    return ReasoningPart(written, tokenizer, body.is_reasoning_included, has_tools, budget)


def asked_of_template(
    body: ReasoningFields, effort: str | None, part: ReasoningPart | None, known: Set[str]
) -> tuple[str, set[str]]:
    """Return the field that asks the chat template for an effort, and the variables that the request does not name.
    The field is empty where the effort is followed without the template. known: the template's variables."""
    added = set(_template_variables(body.model_dump(include={*_ASKING})))
    is_off = effort == "none" and (added & known or (part is not None and part.never_reasons))
    return "" if is_off else body.effort_field, added


def marker_ids(written: ReasoningFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the markers' token ids. Raises InvalidRequestError where a marker is more than one token."""
    if not _are_tokens(written, tokenizer):
        message = "this model's reasoning cannot be bounded: the markers around it are no tokens of their own"
        raise InvalidRequestError(message, "thinking_token_budget")
    return {text: tokenizer.encode(text, allow_special=True)[0] for text in written.markers}


def _are_tokens(written: ReasoningFormat, tokenizer: Tokenizer) -> bool:
    return all(len(tokenizer.encode(text, allow_special=True)) == 1 for text in written.markers)
