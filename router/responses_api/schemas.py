"""Schemas of `/v1/responses`; `translation` converts them to the fields of a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from router.api.schemas import MAX_LIST, MAX_MESSAGES, Body, Label
from router.tools.tools import check_types

MAX_METADATA = 16


class Item(Body):
    """A part of the input. Ids and statuses that clients send back are ignored."""

    model_config = ConfigDict(extra="ignore")


class ItemText(Item):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ItemRefusal(Item):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = Annotated[list[ItemText | ItemRefusal], Field(max_length=MAX_MESSAGES)]


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: Label
    namespace: Label | None = None
    name: Label
    arguments: str


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Label
    output: str | Parts


class ReasoningText(Item):
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] | None = None


class ItemReference(Item):
    """Stands for an output item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: Label


AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference


class FunctionTool(Body):
    type: Literal["function"]
    name: Label
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Functions under a common name. The model sees each with both names."""

    type: Literal["namespace"]
    name: Label
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_LIST)]


AnyTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: Label


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Label | None = None


class Reasoning(Body):
    """No summary is written: the answer contains the reasoning itself."""

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ChatFields(Body):
    """vLLM's fields, which mean the same in a chat completion and are checked there."""

    cache_salt: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    logit_bias: Any = None
    priority: Any = None
    repetition_penalty: Any = None
    seed: Any = None
    skip_special_tokens: Any = None
    stop: Any = None
    structured_outputs: Any = None
    top_k: Any = None


class ResponsesBody(ChatFields):
    """POST /v1/responses"""

    # Labels and hints; a response repeats some of them.
    no_effect: ClassVar[frozenset[str]] = frozenset({
        "include", "stream_options", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "reasoning.summary", "reasoning.generate_summary",
    })  # fmt: skip

    model: Label | None = None
    input: Annotated[
        str | Annotated[list[AnyItem], Field(min_length=1, max_length=MAX_MESSAGES)],
        Field(
            description="a text, or a list of messages, function calls, their outputs, reasoning and item "
            "references; only text parts are supported"
        ),
    ]
    instructions: str | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_LIST)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunctionTool | None,
        Field(description="'none', 'auto', 'required' or {'type': 'function', 'name': ...}"),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[Label, Label], Field(max_length=MAX_METADATA)] | None = None
    user: Label | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _check_types(cls, tools: Any) -> Any:
        check_types(tools, ("function", "namespace"))
        return tools
