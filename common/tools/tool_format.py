"""How models write tool calls: recognized from the chat template, and forced by a grammar.

A format is an entry of `FORMATS`: what tells its templates from others, and how its calls are written
(`json_calls`, `named_calls`, `tagged_calls`, `literal_calls`). `tool_parser` takes calls out of an answer's text.
Knows nothing of tokens, requests or the API's JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.grammar.json_schemas import followable
from common.tools.json_calls import HERMES, LLAMA3_JSON, MISTRAL_LIST
from common.tools.literal_calls import FUNCTION_GEMMA, PYTHONIC
from common.tools.named_calls import DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, KIMI_K2, MISTRAL_NAMED
from common.tools.tagged_calls import GLM, QWEN3_CODER
from common.tools.tool_parser import Schema, ToolFormat

_TAKES_TOOLS = re.compile(r"\btools\b")
# By vLLM's names of their parsers. Templates show a model how to write calls. The first pattern that is found
# decides, since several share their markers.
FORMATS: Mapping[str, tuple[ToolFormat, re.Pattern[str]]] = {
    "qwen3_coder": (QWEN3_CODER, re.compile(r"<tool_call>(?:\s|\\n)*<function=")),
    "glm45": (GLM, re.compile("<arg_key>")),
    "hermes": (HERMES, re.compile(r"""<tool_call>(?:\s|\\n)*\{\\?["'](?:name|arguments)\\?["']""")),
    "llama3_json": (
        LLAMA3_JSON,
        re.compile(r'\{"name": function name, "parameters": dictionary of argument name and its value\}'),
    ),
    "mistral": (MISTRAL_NAMED, re.compile(r"\[TOOL_CALLS\][\s\S]*\[ARGS\]")),
    "mistral_list": (MISTRAL_LIST, re.compile(r"\[TOOL_CALLS\]")),
    "deepseek_v3": (DEEPSEEK_V3, re.compile(r"<｜tool▁call▁begin｜>[\s\S]*```json")),
    "deepseek_v31": (DEEPSEEK_V31, re.compile("<｜tool▁call▁begin｜>")),
    "kimi_k2": (KIMI_K2, re.compile(r"<\|tool_call_argument_begin\|>")),
    "functiongemma": (FUNCTION_GEMMA, re.compile("<start_function_call>")),
    "pythonic": (PYTHONIC, re.compile(r"\[func_name1\(")),
    "llama4_pythonic": (PYTHONIC, re.compile(r"\[func_name1\(")),
    "openai": (HARMONY, re.compile(r"<\|channel\|>[\s\S]*to=functions\.|to=functions\.[\s\S]*<\|channel\|>")),
}


def tool_format(template: str, parser: str = "auto") -> ToolFormat:
    """Return the format of that name, or the one that a chat template's model is trained on (auto).

    Raises InvalidRequestError when there is none.
    """
    if not _TAKES_TOOLS.search(template):
        raise InvalidRequestError("this model's chat template takes no tools", "tools")
    if parser != "auto":
        return FORMATS[parser][0]
    for found, pattern in FORMATS.values():
        if pattern.search(template):
            return found
    raise InvalidRequestError("tools: this server cannot read the calls that this model writes", "tools")


def calls_grammar(
    written: ToolFormat,
    schemas: Mapping[str, Schema],
    is_parallel: bool,
    special: Mapping[str, int],
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of answers that are one call of one of these functions, or several where is_parallel.

    schemas: of the functions' arguments, by name. special: ids of the markers that are special tokens.
    answer: the schema of what may be said instead of calls. Raises InvalidRequestError for what cannot be said.
    """
    before = written.before_arguments(schemas) if answer is None else None
    if before is not None and '"uniqueItems"' in json.dumps(schemas):
        schemas = {name: followable(schema, marks_unique=True) for name, schema in schemas.items()}
    rules = written.lark(schemas, is_parallel, lambda text: _quoted(text, written, special))
    if answer is None:
        found = grammar.lark("\n".join(["start: calls", *rules]))
        return grammar.with_places(found, {text: f"arguments_{index}" for index, text in enumerate(before or ())})
    # The answer's rule is one of its own: `%json` stands alone.
    opening = _quoted(written.answer_opening, written, special)
    rules += [f"answer: {opening} json", f"json: {grammar.json_rule(answer)}"]
    return grammar.lark("\n".join(["start: calls | answer", *rules]))


def text_and_calls_grammar(
    written: ToolFormat, schemas: Mapping[str, Schema], is_parallel: bool, special: Mapping[str, int]
) -> str:
    """Return the grammar of any text in which all that begins like a call is one of these functions' calls.

    Takes what `calls_grammar` takes. Raises InvalidRequestError for what cannot be said.
    """
    unmarked = written.lark_unmarked(schemas, is_parallel, lambda text: _quoted(text, written, special))
    if unmarked is not None:
        return grammar.lark("\n".join(unmarked))
    first = written.begin if written.opening.startswith(written.begin) or not written.opening else written.opening

    def quoted(text: str) -> str:
        """Return Lark for a text; for the marker that begins calls with the text before it."""
        if not text.startswith(first):
            return _quoted(text, written, special)
        return f"before_call {_quoted(text.removeprefix(first), written, special)}"

    rules = written.lark(schemas, is_parallel, quoted)
    if written.opening or not is_parallel:
        start = "start: calls | TEXT"
    else:  # more text may follow each call
        start = "start: call* TEXT"
    # A marker that ordinary tokens spell would be read as one, too.
    none_of = "|".join(re.escape(marker).replace("/", "\\/") for marker in (written.begin, *written.ignored))
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*)({none_of})(?s:.*)/"
    if first in special:
        before = f"before_call: TEXT <[{special[first]}]>"
    else:
        before = f"before_call[suffix={json.dumps(first)}]: TEXT"
    return grammar.lark("\n".join([start, *rules, before, text]))


def _quoted(text: str, written: ToolFormat, special: Mapping[str, int]) -> str:
    """Return Lark for a text, in which markers that are special tokens are those tokens."""
    for marker in (*written.markers, *written.silent):
        if marker in special and marker in text:
            parts = (_quoted(part, written, special) for part in text.split(marker, 1))
            return f" <[{special[marker]}]> ".join(parts).strip()
    return json.dumps(text, ensure_ascii=False) if text else ""
