"""Optional parts of answers: a required format (`router/grammar`), tool calls (`router/tools`), separate reasoning
(`router/reasoning`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from common.text.tokenizer import Tokenizer
from common.wings import has_wing
from protos import types_pb2 as pb
from router.api.render import ChatRenderer, RenderOptions
from router.api.schemas import GenerationBody
from router.api.text import ChoiceText, TextRules
from router.config import RouterConfig
from router.features import Features
from router.grammar.answer_format import AnswerFields, answer_grammar
from router.grammar.answer_parts import AnswerPart, PartsRenderer, StagedText
from router.http.errors import FIELD_NAMES, client_name
from router.template_options.fields import TemplateFields
from router.workers.model_workers import ModelLimits

WORKERS_GRAMMAR_FIELD = "structured_outputs"
HAS_TOOLS = has_wing("router.tools")
if HAS_TOOLS:
    from router.tools.settings import tool_call_parser
    from router.tools.tool_part import ToolPart
    from router.tools.tool_use import tool_use
    from router.tools.tools import ToolFields
HAS_REASONING = has_wing("router.reasoning")
if HAS_REASONING:
    from router.reasoning.reasoning_part import ReasoningFields, asked_of_template, reasoning_part
    from router.reasoning.settings import ReasoningSettings
HAS_ADVICE = has_wing("router.foreign_fields")
if HAS_ADVICE:
    from router.foreign_fields.advice import note_ignored, unheeded


@dataclass(frozen=True, slots=True)
class AnswerFeatures(Features):
    """The format, tools and reasoning that one request asks for."""

    grammar: str = ""  # the grammar that answers follow; empty: none
    tools: list[dict[str, Any]] | None = None
    parts: tuple[AnswerPart, ...] = ()  # parts of chat answers, in the order in which they are split off the text
    grammar_field: str = ""  # the request field with the grammar

    @classmethod
    async def of(
        cls,
        body: GenerationBody,
        num_choices: int,
        tokenizer: Tokenizer,
        config: RouterConfig,
        scope: Scope,
    ) -> AnswerFeatures:
        tools = None
        if HAS_TOOLS and isinstance(body, ToolFields):
            tools = await tool_use(body, num_choices, tokenizer, tool_call_parser(config))
        reasoning = None
        if HAS_REASONING:
            parser = config.of(ReasoningSettings).reasoning_parser
            reasoning = reasoning_part(body, tokenizer, tools is not None, parser)
        parts = () if reasoning is None else (reasoning,)
        no_effect: list[str] = []
        if HAS_ADVICE and isinstance(body, TemplateFields) and body.template_variables:
            known = tokenizer.template_variables(tools is not None)
            effort_field, added = "reasoning_effort", set[str]()
            if HAS_REASONING and isinstance(body, ReasoningFields):
                effort_field, added = asked_of_template(body, body.reasoning_effort, reasoning, known)
            if body.reasoning_effort is None:
                effort_field = ""
            variables = body.chat_template_kwargs or ()
            no_effect = unheeded(effort_field, body.verbosity is not None, variables, known, added)
        if tools is not None:
            no_effect += tools.unfollowed
        if HAS_ADVICE:
            note_ignored(scope, [client_name(name, scope.get(FIELD_NAMES, ())) for name in no_effect])
        if tools is not None:
            return cls(tools.grammar, tools.descriptions, (*parts, ToolPart(tools)), "tools")
        assert isinstance(body, AnswerFields)
        grammar = await answer_grammar(body.response_format, body.structured_outputs, num_choices)
        field = "response_format" if body.structured_outputs is None else "structured_outputs"
        return cls(grammar, parts=parts, grammar_field=field)

    def client_field(self, name: str) -> str:
        """Return the client's field: workers do not know which field had the grammar."""
        return self.grammar_field or name if name == WORKERS_GRAMMAR_FIELD else name

    def sampling(
        self,
        body: GenerationBody,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        prompt_token_ids: list[int],
    ) -> pb.SamplingParams:
        """Return the parameters of a prompt's first choice, with the grammar for what follows the prompt."""
        params = super(AnswerFeatures, self).sampling(body, tokenizer, limits, prompt_token_ids)
        params.grammar = self.grammar
        for part in self.parts:
            params.grammar = part.grammar(params.grammar, prompt_token_ids)
        return params

    def renderer(self, options: RenderOptions, tokenizer: Tokenizer) -> ChatRenderer:
        return PartsRenderer(options, tokenizer, self.parts) if self.parts else ChatRenderer(options, tokenizer)

    def text(self, tokenizer: Tokenizer, rules: TextRules, prompt_token_ids: list[int]) -> ChoiceText:
        if not self.parts:
            return ChoiceText(tokenizer, rules)
        shown = frozenset[int]().union(*(part.shown for part in self.parts))
        text = StagedText(tokenizer, rules, shown)
        text.stages = [part.stage(prompt_token_ids) for part in self.parts]
        return text
