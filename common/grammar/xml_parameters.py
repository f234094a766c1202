"""Converts a schema to Lark of a function's parameters as tags, in XGrammar's styles of a `json_schema`.

Strings are written verbatim up to the tag that ends them; all other values are JSON. Listed parameters come in this
order and no others are allowed; a schema without listed ones allows any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import InvalidRequestError
from common.grammar.grammar import json_rule
from common.grammar.json_schemas import resolved
from common.grammar.schema_rewriting import ANNOTATIONS

# Texts before and after a parameter's name, and at the end of its value.
STYLES = {
    "qwen_xml": ("<parameter=", ">", "</parameter>"),
    "minimax_xml": ('<parameter name="', '">', "</parameter>"),
    "glm_xml": ("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
}
_BLANKS = "/[ \\n\\t]{0,8}/"  # with more, a small model would write blanks until max_tokens
_NAME = "/[a-zA-Z_][a-zA-Z0-9_]*/"
_OF_TEXTS = ANNOTATIONS | {"type", "enum", "const", "format"}


def xml_parameters(schema: Mapping[str, Any], style: str, where: str, rule: Callable[[str, str, str], str]) -> str:
    """Return Lark for the parameters. rule: adds a rule of that name, body and options, and returns its name.

    Raises InvalidRequestError for a schema that a style cannot follow.
    """
    before, after, end = STYLES[style]
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        raise InvalidRequestError(f"{where}: must be the schema of an object")

    def value(given: Any, at: str) -> str:
        reference = given.get("$ref") if isinstance(given, Mapping) else None
        target = given if reference is None else resolved(schema, reference)
        if not _is_text(target):
            number = rule("json", json_rule({**(given if isinstance(given, Mapping) else {}), **shared}), "")
            return f"{_BLANKS} {number} {_BLANKS} {json.dumps(end)}"
        target = target if isinstance(target, Mapping) else {}
        unknown = sorted(set(target) - _OF_TEXTS) if "type" in target else []
        if unknown:
            raise InvalidRequestError(f"{at}: {unknown[0]} of a text is not followed with style {style}")
        listed = [target["const"]] if "const" in target else target.get("enum", [])
        texts = [json.dumps(each) for each in listed if isinstance(each, str)]
        if texts:
            return f"({' | '.join(texts)}) {json.dumps(end)}"
        return rule("text", "/(?s:.*)/", f"[suffix={json.dumps(end)}]")

    if not properties:
        any_value = rule("text", "/(?s:.*)/", f"[suffix={json.dumps(end)}]")
        one = f"{_BLANKS} {json.dumps(before)} {_NAME} {json.dumps(after)} {any_value}"
        return f"({one})* {_BLANKS}" if schema.get("additionalProperties") is not False else _BLANKS
    said = []
    for name, given in properties.items():
        begin = f"{_BLANKS} {json.dumps(f'{before}{name}{after}')}"
        one = f"({begin} {value(given, f'{where}.properties.{name}')})"
        said.append(one if name in required else f"{one}?")
    return " ".join([*said, _BLANKS])


def _is_text(schema: Any) -> bool:
    """Whether a string is a valid value: then every value is read as a string."""
    if not isinstance(schema, Mapping):
        return schema is not False
    types = schema.get("type")
    if types is not None:
        return types == "string" or (isinstance(types, list) and "string" in types)
    if "const" in schema or "enum" in schema:
        return all(isinstance(each, str) for each in schema.get("enum", [schema.get("const")]))
    options = schema.get("anyOf") or schema.get("oneOf")
    return not options or any(map(_is_text, options))
