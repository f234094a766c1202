"""Schemas of `/v1/messages`; `translation` converts them to the fields of a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from common.errors import InvalidRequestError
from router.api.schemas import MAX_LIST, MAX_MESSAGES, MAX_STOPS, Body, Label, StopString
from router.tools.tools import check_types

NO_THREADS = "thread_unsupported_request"  # Anthropic's code, on which its clients send the conversation instead


class Block(Body):
    """A part of a message. Hints for other servers, such as cache_control, are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Reasoning of another server, which only that server can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Label
    name: Label
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)] = ""
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """clear_at: a system message may be shown only until the next message of the user."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(max_length=MAX_MESSAGES)]
    clear_at: Literal["next_user_message", "never"] | None = None


class MessagesTool(Block):
    type: Literal["custom"] | None = None
    name: Label
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """The budget is only advice: the model decides how long it reasons."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Label | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    content: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Label | None = None
    format: OutputFormat | None = None


class ThinkingTurns(Body):
    type: Literal["all", "thinking_turns"]
    value: Annotated[int, Field(ge=1)] | None = None


class ClearThinking(Body):
    """Leaves out the reasoning of all but the last assistant messages that have some."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns | None = None

    @property
    def num_kept(self) -> int | None:
        """The number of messages that keep their reasoning; None: all."""
        if self.keep == "all" or (self.keep is not None and self.keep.type == "all"):
            return None
        return 1 if self.keep is None else self.keep.value or 1


class ContextManagement(Body):
    edits: Annotated[list[ClearThinking], Field(max_length=1)] | None = None


class Metadata(Body):
    model_config = ConfigDict(extra="ignore")

    user_id: Label | None = None


class PromptBody(Body):
    """POST /v1/messages/count_tokens"""

    model: Label | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_LIST)] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_LIST)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = None  # a hint for other servers
    thread: Any = None

    @field_validator("thread")
    @classmethod
    def _check_thread(cls, thread: Any) -> None:
        if thread is not None:
            message = "threads are not supported: send the whole conversation, without thread"
            raise InvalidRequestError(message, "thread", NO_THREADS)

    @field_validator("tools", mode="before")
    @classmethod
    def _check_types(cls, tools: Any) -> Any:
        check_types(tools, ("custom",))
        return tools


class MessagesBody(PromptBody):
    """POST /v1/messages"""

    no_effect: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "service_tier", "diagnostics", "thinking.budget_tokens"}
    )

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Label | None = None
    diagnostics: Any = None  # asks why a prompt was not cached


class ChatFields(Body):
    """What the chat completions for messages have besides their usual fields."""

    # Anthropic's API requires max_tokens, but clients do not know the context.
    may_exceed_context: ClassVar[bool] = True
