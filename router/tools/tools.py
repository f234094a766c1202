"""Schemas of the tools that a chat request offers, and of its tool choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.errors import InvalidRequestError
from router.api.schemas import MAX_LIST, Body
from router.grammar.answer_format import AnswerFields

MAX_SCHEMA_DEPTH = 64  # since chat templates render schemas recursively
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Body):
    """Required calls, and with `strict` all calls, follow the closed schema; otherwise the schema is advice."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        return NO_ARGUMENTS if self.parameters is None else {**self.parameters, "type": "object"}


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_LIST)]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    Field(description="'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"),
]


class ToolFields(AnswerFields):
    """Tool fields of a chat request's body, checked together with the answer's format."""

    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ToolFields:
        check_tools(self.tools or [], self.tool_choice)
        has_tools = bool(self.tools) and self.tool_choice != "none"
        if has_tools and self.response_format is not None and self.response_format.type == "structural_tag":
            raise InvalidRequestError("structural tags cannot be combined with tools", "response_format")
        if has_tools and self.structured_outputs is not None:
            message = "structured_outputs cannot be combined with tools; response_format can"
            raise InvalidRequestError(message, "structured_outputs")
        return self


def check_types(tools: Any, known: Container[str]) -> None:
    """Refuse tools that the provider of an API runs itself, as its web search. Raises InvalidRequestError."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in known:
            message = f"tools.{index}.type: this server has no {kind[:64]!r} tool: leave it out, or offer a function"
            raise InvalidRequestError(message, f"tools.{index}.type", "unsupported_parameter")


def is_forced(choice: ToolChoice) -> bool:
    """Whether the answer has to be a call."""
    return choice == "required" or isinstance(choice, NamedTool)


def check_tools(tools: list[Tool], choice: ToolChoice) -> None:
    """Check that names are unique and that the tool to call exists. Raises InvalidRequestError."""
    names = Counter(tool.function.name for tool in tools)
    for index, tool in enumerate(tools):
        where = f"tools.{index}.function"
        if names[tool.function.name] > 1:
            raise InvalidRequestError(f"{where}.name: two tools are called {tool.function.name!r}", f"{where}.name")
        schema = tool.function.parameters or {}
        if schema.get("type", "object") != "object":
            message = f"{where}.parameters must be the JSON schema of an object"
            raise InvalidRequestError(message, f"{where}.parameters")
        if _is_deeper(schema, MAX_SCHEMA_DEPTH):
            message = f"{where}.parameters is nested more than {MAX_SCHEMA_DEPTH} deep"
            raise InvalidRequestError(message, f"{where}.parameters")
    if is_forced(choice) and not tools:
        raise InvalidRequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequestError(f"tool_choice: no tool is called {choice.function.name!r}", "tool_choice")


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether objects and arrays are nested more than `limit` deep."""
    level = [value]
    for _ in range(limit + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True
