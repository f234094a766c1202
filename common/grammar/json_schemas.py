"""Prepares JSON schemas for grammars: parses, closes and rewrites them into supported keywords.

Only schemas are changed, not data inside of them: a property may be called `format`, and a constant may look like a
schema. Knows nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from common.grammar.schema_rewriting import Rewriting, TooManyNodesError

Schema = dict[str, Any]

MAX_NODES = 100_000  # a larger schema is too much for a grammar, and is left unchanged

_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_OF_SCHEMA = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_BRANCHES = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")


def parsed_schema(text: str) -> Schema | None:
    """Parse a text as a schema; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def followable(schema: Mapping[str, Any], marks_unique: bool = False) -> Mapping[str, Any]:
    """Return the schema in keywords that grammars support, as far as possible, see `common.grammar.schema_rewriting`.

    marks_unique: for a whole answer, whose items `common.grammar.unique_items` compares.
    """
    try:
        return Rewriting(lambda reference: resolved(schema, reference), marks_unique).document(schema)
    except (TooManyNodesError, RecursionError):  # unchanged, it is refused with a message about its own keywords
        return schema


def closed(schema: Mapping[str, Any]) -> Schema:
    """Return the schema with `additionalProperties: false` in objects that list properties and do not set it.

    An object whose properties are listed in several places (`allOf`, properties and `anyOf` or `$ref`) stays open, as
    each place would forbid what the others list. An object that requires an unlisted property stays open, too.
    """
    copy, nodes = _copied(schema)
    is_open: set[int] = set()
    reached = [node for node in nodes if _num_places(node) > 1]
    while reached:
        node = reached.pop()
        if id(node) in is_open:
            continue
        is_open.add(id(node))
        for key in _BRANCHES:
            reached += _schemas_in(node.get(key), key == "dependentSchemas")
        if "$ref" in node:
            target = resolved(copy, node["$ref"])
            if target is None:
                return copy  # what must stay open is unknown
            reached.append(target)
    for node in nodes:
        if id(node) not in is_open and _lists_all(node):
            node["additionalProperties"] = False
    return copy


def without_unique(schema: Mapping[str, Any]) -> Schema:
    """Return the schema without `uniqueItems`."""
    copy, nodes = _copied(schema)
    for node in nodes:
        node.pop("uniqueItems", None)
    return copy


def _num_places(node: Schema) -> int:
    """Count the parts of a schema that may list properties of the same object."""
    lists = "properties" in node or "patternProperties" in node
    conditions = sum(2 for key in ("if", "dependentSchemas") if key in node)
    all_of = node.get("allOf")
    num_all_of = len(all_of) if isinstance(all_of, list) else 0
    return lists + conditions + num_all_of + sum(key in node for key in ("anyOf", "oneOf", "$ref"))


def _lists_all(node: Schema) -> bool:
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or "additionalProperties" in node or "unevaluatedProperties" in node:
        return False
    if "patternProperties" in node:
        return True
    least = node.get("minProperties", 0)
    return (not isinstance(required, list) or all(name in listed for name in required)) and not (
        isinstance(least, int) and least > len(listed)
    )


def _copied(schema: Mapping[str, Any]) -> tuple[Schema, list[Schema]]:
    """Return a deep copy and the schemas in it; no schemas if there are too many."""
    copy: Schema = json.loads(json.dumps(schema))
    nodes = [copy]
    for node in nodes:  # grows during the loop
        nodes += _children(node)
        if len(nodes) > MAX_NODES:
            return copy, []
    return copy, nodes


def _children(node: Schema) -> Iterator[Schema]:
    for key, value in node.items():
        if key in _OF_SCHEMAS or key in _OF_SCHEMA:
            yield from _schemas_in(value, key in _OF_SCHEMAS)


def _schemas_in(value: Any, is_by_name: bool) -> list[Schema]:
    """Return the schemas of a keyword: one, or several in a list or by name."""
    if isinstance(value, dict):
        found = list(value.values()) if is_by_name else [value]
    else:
        found = value if isinstance(value, list) else []
    return [item for item in found if isinstance(item, dict)]


def resolved(root: Mapping[str, Any], reference: Any) -> Schema | None:
    """Return the target of a reference within the schema; None if it is not found."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    is_anchor = reference[1:2] not in ("", "/")
    return found if isinstance(found, dict) and not is_anchor else None
