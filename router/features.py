"""Optional parts of a request: answers in a given format (`router/grammar`), tools (`router/tools`), reasoning that
is told apart (`router/reasoning`), rules on logits (`router/logit_rules`), cut prompts (`router/truncation`).

The one file that names them: bodies with their fields, what these ask for, and what this makes of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import create_model

from common.text.tokenizer import Tokenizer
from common.wings import has_wing
from protos import types_pb2 as pb
from router.api.chat_renderer import ChatRenderer
from router.api.render import RenderOptions
from router.api.sampling import sampling_params
from router.api.schemas import Body, ChatCompletionBody, CompletionBody
from router.api.text import ChoiceText, StopRules
from router.config import RouterConfig
from router.workers.model_workers import ModelLimits

B = TypeVar("B", bound=Body)
WORKERS_GRAMMAR_FIELD = "structured_outputs"
HAS_GRAMMAR = has_wing("router.grammar")
HAS_TOOLS = HAS_GRAMMAR and has_wing("router.tools")
HAS_REASONING = HAS_GRAMMAR and has_wing("router.reasoning")
HAS_ADVICE = has_wing("router.foreign_fields")
HAS_LOGIT_RULES = has_wing("router.logit_rules")
HAS_TRUNCATION = has_wing("router.truncation")
_common_fields: list[type[Body]] = []
_answer_fields: list[type[Body]] = []
_chat_fields = _answer_fields
if HAS_LOGIT_RULES:
    from router.logit_rules.rules import LogitRuleFields, add_rules

    _common_fields = [LogitRuleFields]
if HAS_TRUNCATION:
    from router.truncation.truncation import TruncationFields, truncated_prompts

    _common_fields = [*_common_fields, TruncationFields]
if HAS_GRAMMAR:
    from router.grammar.answer_format import AnswerFields, answer_grammar
    from router.grammar.answer_parts import AnswerPart, PartsRenderer, StagedText

    _answer_fields = _chat_fields = [AnswerFields]
if HAS_TOOLS:
    from router.tools.settings import ToolSettings
    from router.tools.tool_part import ToolPart
    from router.tools.tool_use import tool_use
    from router.tools.tools import ToolFields

    _chat_fields = [ToolFields]
if HAS_REASONING:
    from router.reasoning.reasoning_part import ReasoningFields, asked_of_template, reasoning_part
    from router.reasoning.settings import ReasoningSettings

    _chat_fields = [*_chat_fields, ReasoningFields]
if HAS_ADVICE:
    from router.foreign_fields.advice import unheeded


def _with(body: type[B], fields: list[type[Body]]) -> type[B]:
    return cast("type[B]", create_model(body.__name__, __base__=(body, *fields), __doc__=body.__doc__))


CHAT_BODY = _with(ChatCompletionBody, [*_common_fields, *_chat_fields])
COMPLETION_BODY = _with(CompletionBody, [*_common_fields, *_answer_fields])


def tool_call_parser(config: RouterConfig) -> str:
    """The format of calls that an operator has named; auto: none."""
    return config.of(ToolSettings).tool_call_parser if HAS_TOOLS else "auto"


def truncated(
    body: ChatCompletionBody | CompletionBody, limits: ModelLimits, prompts: list[list[int]]
) -> list[list[int]]:
    """The prompts of a request, cut to the length that it asks for; the list itself where it does not ask."""
    return truncated_prompts(body, limits, prompts) if HAS_TRUNCATION else prompts


@dataclass(frozen=True, slots=True)
class Features:
    """What one request asks for."""

    grammar: str = ""  # that answers follow; empty: none
    tools: list[dict[str, Any]] | None = None  # their descriptions, for the chat template
    parts: tuple[AnswerPart, ...] = ()  # of chat answers, as they are taken out of the text
    grammar_field: str = ""  # what asks for the grammar
    no_effect: tuple[str, ...] = ()  # fields that change nothing

    @classmethod
    async def of(
        cls, body: ChatCompletionBody | CompletionBody, num_choices: int, tokenizer: Tokenizer, config: RouterConfig
    ) -> Features:
        """Raises InvalidRequestError for what cannot be done."""
        tools = None
        if HAS_TOOLS and isinstance(body, ToolFields):
            tools = await tool_use(body, num_choices, tokenizer, tool_call_parser(config))
        reasoning = None
        if HAS_REASONING:
            parser = config.of(ReasoningSettings).reasoning_parser
            reasoning = reasoning_part(body, tokenizer, tools is not None, parser)
        parts = () if reasoning is None else (reasoning,)
        no_effect: tuple[str, ...] = ()
        if HAS_ADVICE and isinstance(body, ChatCompletionBody) and body.template_variables:
            known = tokenizer.template_variables(tools is not None)
            effort_field, added = "reasoning_effort", set[str]()
            if HAS_REASONING and isinstance(body, ReasoningFields):
                effort_field, added = asked_of_template(body, body.reasoning_effort, reasoning, known)
            if body.reasoning_effort is None:
                effort_field = ""
            variables = body.chat_template_kwargs or ()
            no_effect = (*unheeded(effort_field, body.verbosity is not None, variables, known, added),)
        if tools is not None:
            no_effect += tools.unfollowed
            return cls(tools.grammar, tools.descriptions, (*parts, ToolPart(tools)), "tools", no_effect)
        if HAS_GRAMMAR and isinstance(body, AnswerFields):
            grammar = await answer_grammar(body.response_format, body.structured_outputs, num_choices)
            field = "response_format" if body.structured_outputs is None else "structured_outputs"
            return cls(grammar, parts=parts, grammar_field=field, no_effect=no_effect)
        return cls(parts=parts, no_effect=no_effect)

    def client_field(self, name: str) -> str:
        """The field that a client sent, by a worker's name of it: workers do not know who asked for a grammar."""
        return self.grammar_field or name if name == WORKERS_GRAMMAR_FIELD else name

    def sampling(
        self,
        body: ChatCompletionBody | CompletionBody,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        prompt_token_ids: list[int],
    ) -> pb.SamplingParams:
        """Parameters of a prompt's first choice, among them the grammar of what follows the prompt.

        Raises InvalidRequestError.
        """
        grammar = self.grammar
        for part in self.parts:
            grammar = part.grammar(grammar, prompt_token_ids)
        params = sampling_params(body, limits, len(prompt_token_ids), grammar)
        if HAS_LOGIT_RULES and isinstance(body, LogitRuleFields):
            add_rules(params, body, tokenizer, limits)
        return params

    def renderer(self, options: RenderOptions, tokenizer: Tokenizer) -> ChatRenderer:
        """What renders answers to a chat request."""
        return PartsRenderer(options, tokenizer, self.parts) if self.parts else ChatRenderer(options, tokenizer)

    def text(
        self,
        tokenizer: Tokenizer,
        rules: StopRules,
        continues: bool,
        has_logprobs: bool,
        skip_special: bool,
        prompt_token_ids: list[int],
    ) -> ChoiceText:
        """The text of one choice."""
        if not self.parts:
            return ChoiceText(tokenizer, rules, continues, has_logprobs, skip_special)
        shown = frozenset[int]().union(*(part.shown for part in self.parts))
        text = StagedText(tokenizer, rules, continues, has_logprobs, skip_special, shown)
        text.stages = [part.stage(prompt_token_ids) for part in self.parts]
        return text
