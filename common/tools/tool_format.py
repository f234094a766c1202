"""How models write tool calls: recognized from the chat template, and enforced by a grammar.

A format is an entry of `FORMATS`: a pattern that recognizes its templates, and how its calls are written
(`json_calls`, `named_calls`, `tagged_calls`, `literal_calls`). `tool_parser` extracts the calls from an answer's
text. Knows nothing of tokens, requests or the API's JSON.
"""

from __future__ import annotations

import json
import re
import secrets
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
# By vLLM's parser names. Templates show the model how to write calls. The first pattern found decides, since several
# formats share markers.
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
    """Return the format with that name, or for auto the one that a chat template's model is trained on.

    Raises InvalidRequestError if there is none.
    """
    if not _TAKES_TOOLS.search(template):
        raise InvalidRequestError("this model's chat template takes no tools", "tools")
    if parser != "auto":
        return FORMATS[parser][0]
    for found, pattern in FORMATS.values():
        if pattern.search(template):
            return found
    raise InvalidRequestError("tools: this server cannot read the calls that this model writes", "tools")


def new_call_id(written: ToolFormat, name: str, num_before: int) -> str:
    """Return the id of a call, in the form that templates which show ids take. num_before: calls before it."""
    if written is KIMI_K2:
        return f"functions.{name}:{num_before}"
    if written in (MISTRAL_LIST, MISTRAL_NAMED):
        return secrets.token_hex(5)[:9]  # Mistral's templates refuse conversations with other ids
    return f"call_{secrets.token_hex(12)}"


def calls_grammar(
    written: ToolFormat,
    schemas: Mapping[str, Schema],
    is_parallel: bool,
    special: Mapping[str, int],
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of answers that are one call of these functions, or with is_parallel several.

    schemas: of the functions' arguments, by name. special: ids of markers that are special tokens. answer: schema of
    an answer that is allowed instead of calls. Raises InvalidRequestError for what a grammar cannot express.
    """
    before = written.before_arguments(schemas) if answer is None else None
    if before is not None and '"uniqueItems"' in json.dumps(schemas):
        schemas = {name: followable(schema, marks_unique=True) for name, schema in schemas.items()}
    rules = written.lark(schemas, is_parallel, lambda text: _quoted(text, written, special))
    if answer is None:
        found = grammar.lark("\n".join(["start: calls", *rules]))
        return grammar.with_places(found, {text: f"arguments_{index}" for index, text in enumerate(before or ())})
    # The answer has its own rule, since `%json` must stand alone.
    opening = _quoted(written.answer_opening, written, special)
    rules += [f"answer: {opening} json", f"json: {grammar.json_rule(answer)}"]
    return grammar.lark("\n".join(["start: calls | answer", *rules]))


def text_and_calls_grammar(
    written: ToolFormat, schemas: Mapping[str, Schema], is_parallel: bool, special: Mapping[str, int]
) -> str:
    """Return the grammar of any text in which everything that begins like a call is a call of these functions.

    Arguments as for `calls_grammar`. Raises InvalidRequestError for what a grammar cannot express.
    """
    unmarked = written.lark_unmarked(schemas, is_parallel, lambda text: _quoted(text, written, special))
    if unmarked is not None:
        return grammar.lark("\n".join(unmarked))
    first = written.begin if written.opening.startswith(written.begin) or not written.opening else written.opening

    def quoted(text: str) -> str:
        """Return Lark for a text; for the marker that begins calls, together with the text before it."""
        if not text.startswith(first):
            return _quoted(text, written, special)
        return f"before_call {_quoted(text.removeprefix(first), written, special)}"

    rules = written.lark(schemas, is_parallel, quoted)
    if written.opening or not is_parallel:
        start = "start: calls | TEXT"
    else:  # more text may follow each call
        start = "start: call* TEXT"
    # A marker spelled with ordinary tokens would be read as one, too.
    none_of = "|".join(re.escape(marker).replace("/", "\\/") for marker in (written.begin, *written.ignored))
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*)({none_of})(?s:.*)/"
    if first in special:
        before = f"before_call: TEXT <[{special[first]}]>"
    else:
        before = f"before_call[suffix={json.dumps(first)}]: TEXT"
    return grammar.lark("\n".join([start, *rules, before, text]))


def _quoted(text: str, written: ToolFormat, special: Mapping[str, int]) -> str:
    """Return Lark for a text in which markers that are special tokens are written as these tokens."""
    for marker in (*written.markers, *written.silent):
        if marker in special and marker in text:
            parts = (_quoted(part, written, special) for part in text.split(marker, 1))
            return f" <[{special[marker]}]> ".join(parts).strip()
    return json.dumps(text, ensure_ascii=False) if text else ""
