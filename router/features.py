"""Request fields that wings add, and the interface by which these fields change a request and its answer."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from pydantic import create_model
from starlette.types import Scope

from common.text.tokenizer import Tokenizer
from common.wings import call_wing, from_wing
from protos import types_pb2 as pb
from router.api.render import ChatRenderer, RenderOptions
from router.api.sampling import sampling_params
from router.api.schemas import Body, ChatCompletionBody, GenerationBody
from router.api.text import ChoiceText, TextRules
from router.config import RouterConfig
from router.workers.model_workers import ModelLimits

B = TypeVar("B", bound=Body)
COMMON_FIELDS = (
    "router.stop_strings.stops:StopFields",
    "router.logit_rules.rules:LogitRuleFields",
    "router.truncation.truncation:TruncationFields",
    "router.grammar.answer_format:AnswerFields",
)
CHAT_FIELDS = (
    "router.message_parts.messages:MessageFields",
    "router.template_options.fields:TemplateFields",
    "router.several_choices.fields:ChoiceFields",
    "router.tools.tools:ToolFields",
    "router.reasoning.reasoning_part:ReasoningFields",
    "router.answer_details.details:ChatDetailFields",
)


def with_fields(body: type[B], *fields: str) -> type[B]:
    """Extend `body` by the fields of the installed wings, whose properties override its own."""
    bases = (*filter(None, map(from_wing, fields)), body)
    return cast("type[B]", create_model(body.__name__, __base__=bases, __doc__=body.__doc__))


CHAT_BODY = with_fields(ChatCompletionBody, *CHAT_FIELDS, *COMMON_FIELDS)


def truncated(body: GenerationBody, limits: ModelLimits, prompts: list[list[int]]) -> list[list[int]]:
    """Truncate the prompts of a request as it asks for; return the list itself if it does not ask."""
    cut: list[list[int]] | None = call_wing("router.truncation.truncation:truncated_prompts", body, limits, prompts)
    return prompts if cut is None else cut


class Features:
    """How one request and its answer are made. `router/answers` adds formats, tools and reasoning of answers."""

    tools: list[dict[str, Any]] | None = None  # descriptions of tools, for the chat template

    @classmethod
    async def of(
        cls,
        body: GenerationBody,
        num_choices: int,
        tokenizer: Tokenizer,
        config: RouterConfig,
        scope: Scope,
    ) -> Features:
        """Read a request. scope: its ASGI scope. Raises InvalidRequestError for fields that cannot be followed."""
        return cls()

    def client_field(self, name: str) -> str:
        """Return the client's field for a worker's name of it."""
        return name

    def sampling(
        self,
        body: GenerationBody,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        prompt_token_ids: list[int],
    ) -> pb.SamplingParams:
        """Return the parameters of a prompt's first choice. Raises InvalidRequestError."""
        params = sampling_params(body, limits, len(prompt_token_ids))
        call_wing("router.logit_rules.rules:add_rules", params, body, tokenizer, limits)
        return params

    def renderer(self, options: RenderOptions, tokenizer: Tokenizer) -> ChatRenderer:
        """Return the renderer for answers to a chat request."""
        return ChatRenderer(options, tokenizer)

    def text(self, tokenizer: Tokenizer, rules: TextRules, prompt_token_ids: list[int]) -> ChoiceText:
        """Return the text state of one choice."""
        return ChoiceText(tokenizer, rules)
