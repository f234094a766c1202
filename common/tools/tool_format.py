"""How models write tool calls: recognized from the chat template, and forced by a grammar.

`tool_parser` takes calls out of an answer's text. Knows nothing of tokens, requests or the API's JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.grammar import grammar


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write a call: `begin`, a JSON object with a name and arguments, `end`."""

    begin: str  # empty: an answer that begins with the object is a call
    end: str
    space: str  # between the object and the markers
    arguments: str  # the key of the arguments
    is_repeatable: bool  # a forced answer may have several calls, a line each
    separator: str  # a character that may come before another call, where no marker does


HERMES = ToolFormat("<tool_call>", "</tool_call>", "\n", "arguments", True, "")  # and Qwen
LLAMA3_JSON = ToolFormat("", "", "", "parameters", False, ";")

_TAKES_TOOLS = re.compile(r"\btools\b")
# Templates show a model how to write calls. They tell these formats from others with the same markers.
_SHOWN = (
    (HERMES, re.compile(r"""<tool_call>(?:\s|\\n)*\{\\?["'](?:name|arguments)\\?["']""")),
    (LLAMA3_JSON, re.compile(r'\{"name": function name, "parameters": dictionary of argument name and its value\}')),
)


def tool_format(template: str) -> ToolFormat:
    """The format that a chat template's model is trained on. Raises InvalidRequestError when there is none."""
    if not _TAKES_TOOLS.search(template):
        raise InvalidRequestError("this model's chat template takes no tools", "tools")
    for found, pattern in _SHOWN:
        if pattern.search(template):
            return found
    raise InvalidRequestError("tools: this server cannot read the calls that this model writes", "tools")


def calls_grammar(
    written: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    is_parallel: bool,
    special: Mapping[str, int],
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of answers that are one call of one of these functions, or several calls where is_parallel.

    schemas: of the functions' arguments, by name. special: ids of the markers that are special tokens.
    answer: the schema of what may be said instead of calls.
    """

    def quoted(text: str) -> str:
        return json.dumps(text) if text else ""

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else quoted(text)

    begin, end = marker(written.begin), marker(written.end)
    several = ' ("\\n" call)*' if is_parallel and written.is_repeatable else ""
    rules = [f"calls: call{several}", "call: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
    for index, (name, schema) in enumerate(schemas.items()):
        before = quoted(f'{written.space}{{"name": {json.dumps(name)}, "{written.arguments}": ')
        after = quoted("}" + written.space)
        rules.append(f"call_{index}: {begin} {before} arguments_{index} {after} {end}")
        rules.append(f"arguments_{index}: {grammar.json_rule(schema)}")
    if answer is None:
        return grammar.lark("\n".join(["start: calls", *rules]))
    return grammar.lark("\n".join(["start: calls | answer", *rules, f"answer: {grammar.json_rule(answer)}"]))
