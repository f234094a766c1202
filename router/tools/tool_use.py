"""Which tools a chat request's answers may call, and the grammar for the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.grammar.grammar import MAX_GRAMMAR_CHARS, json_schema
from common.grammar.json_schemas import closed, without_unique
from common.text.tokenizer import Tokenizer
from common.tools.named_calls import HARMONY
from common.tools.tool_format import calls_grammar, text_and_calls_grammar, tool_format
from common.tools.tool_parser import Schema, ToolFormat
from router.grammar.answer_format import answer_grammar, checked_grammar, followed_schema, json_answer_schema
from router.tools.tools import NamedTool, Tool, ToolFields, is_forced

_ONE_CALL = "only supports single tool-calls"  # Llama 3's templates refuse a message with several
ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and how its answers may call them."""

    written: ToolFormat
    descriptions: list[dict[str, Any]]  # for the chat template
    functions: Mapping[str, Schema]  # schemas of the arguments, by name
    is_parallel: bool
    is_forced: bool  # an answer consists of calls only
    is_json: bool  # without calls, an answer is JSON in a given format, which may look like a call without its marker
    begin_id: int | None  # of the special token that begins a call
    shown: frozenset[int]  # special tokens that mark calls
    grammar: str  # empty: the model decides
    unfollowed: tuple[str, ...]  # fields whose schema no grammar can follow


async def tool_use(body: ToolFields, num_choices: int, tokenizer: Tokenizer, parser: str) -> ToolUse | None:
    """Return what the answers may call; None: nothing. Raises InvalidRequestError, also if the model has no tools."""
    if not body.tools or body.tool_choice == "none":
        return None
    written = tool_format(tokenizer.tool_template, parser)
    markers = {text: tokenizer.special_id_of.get(text) for text in (*written.markers, *written.silent)}
    special = {text: token_id for text, token_id in markers.items() if token_id is not None}
    is_parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    is_parallel = is_parallel and _ONE_CALL not in tokenizer.tool_template
    grammar, unfollowed = await _grammar(body, num_choices, written, is_parallel, special)
    return ToolUse(
        written,
        [_description(tool, written) for tool in body.tools],
        {tool.function.name: tool.function.arguments_schema for tool in body.tools},
        is_parallel,
        is_forced(body.tool_choice),
        json_answer_schema(body.response_format) is not None,
        special.get(written.begin),
        frozenset(special[text] for text in written.markers if text in special),
        grammar,
        tuple(unfollowed),
    )


def _description(tool: Tool, written: ToolFormat) -> dict[str, Any]:
    """Return a tool for the chat template."""
    found = tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
    if written is HARMONY:
        found["function"].setdefault("description", "")  # gpt-oss's template takes no tool without one
    return found


async def _grammar(
    body: ToolFields, num_choices: int, written: ToolFormat, is_parallel: bool, special: dict[str, int]
) -> tuple[str, list[str]]:
    """Return a grammar, empty for any text, and the fields that it does not follow.

    The grammar is of required calls, of calls or an answer in a given format, or of text with strict calls.
    """
    if json_answer_schema(body.response_format) is None and not is_forced(body.tool_choice):
        return await _strict_grammar(body, num_choices, written, is_parallel, special)
    await answer_grammar(body.response_format, None, 1)  # checked alone, so that errors name the schema
    # If the answer has to be a call, there is no text to follow the format.
    answer = None if is_forced(body.tool_choice) else followed_schema(body.response_format)
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    tools = {f"tools.{i}.function": tool.function for i, tool in enumerate(body.tools or ())}
    chosen = {where: function for where, function in tools.items() if named in (None, function.name)}
    schemas = {function.name: closed(function.arguments_schema) for function in chosen.values()}
    # In a thread, as for schemas: rewriting the longest takes 0.3 s.
    found = await asyncio.to_thread(calls_grammar, written, schemas, is_parallel, special, answer)
    if len(found) <= MAX_GRAMMAR_CHARS:
        for where, function in chosen.items():  # each checked alone, so that errors name it
            await checked_grammar(json_schema(schemas[function.name]), f"{where}.parameters")
    return await checked_grammar(found, "tools", num_choices), []


async def _strict_grammar(
    body: ToolFields, num_choices: int, written: ToolFormat, is_parallel: bool, special: dict[str, int]
) -> tuple[str, list[str]]:
    """Return a grammar of texts whose calls name offered functions and follow the schemas of strict ones; empty: any
    text. Also return the fields that it does not follow.

    Clients set `strict` freely, so a schema or call format that no grammar can follow is only advice. So is
    `uniqueItems`.
    """
    functions = [tool.function for tool in body.tools or ()]
    strict = {function.name: f"tools.{i}.function.strict" for i, function in enumerate(functions) if function.strict}
    if not strict:
        return "", []
    schemas = {function.name: ANY_OBJECT for function in functions}
    try:
        for function in functions:
            schema = closed(function.arguments_schema)
            for wanted in (schema, without_unique(schema)) if function.strict else ():
                if await _can_follow(written, {function.name: wanted}, special):
                    schemas[function.name] = wanted
                    break
        unfollowed = [field for name, field in strict.items() if schemas[name] is ANY_OBJECT]
        if len(unfollowed) == len(strict):
            return "", unfollowed
        found = await asyncio.to_thread(text_and_calls_grammar, written, schemas, is_parallel, special)
        return await checked_grammar(found, "tools", num_choices), unfollowed
    except InvalidRequestError:
        return "", list(strict.values())


async def _can_follow(written: ToolFormat, schemas: dict[str, Schema], special: dict[str, int]) -> bool:
    try:
        found = await asyncio.to_thread(text_and_calls_grammar, written, schemas, False, special)
        await checked_grammar(found, "tools")
    except InvalidRequestError:
        return False
    return True
