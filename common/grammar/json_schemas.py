"""JSON schemas before they become grammars: read, closed, rewritten in what grammars follow.

Only schemas are touched, not what stands in them as data: a property may be called `format`, and a constant may look
like a schema. Knows nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from common.grammar.schema_rewriting import Rewriting, TooManyNodesError

Schema = dict[str, Any]

MAX_NODES = 100_000  # a schema with more is too much for a grammar, and is left alone

_OF_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_OF_SCHEMA = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_BRANCHES = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")


def parsed_schema(text: str) -> Schema | None:
    """The schema that a text is; None for other texts."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def followable(schema: Mapping[str, Any], marks_unique: bool = False) -> Mapping[str, Any]:
    """The schema in keywords that grammars follow, as far as that goes: `common.grammar.schema_rewriting`.

    marks_unique: of a whole answer, whose items `common.grammar.unique_items` compares.
    """
    try:
        return Rewriting(lambda reference: resolved(schema, reference), marks_unique).document(schema)
    except (TooManyNodesError, RecursionError):  # which is refused in the words of what it has
        return schema


def closed(schema: Mapping[str, Any]) -> Schema:
    """The schema with `additionalProperties: false` in objects that list properties and say nothing of others.

    An object whose properties are listed in several places (`allOf`, properties and `anyOf` or `$ref`) stays open:
    each place would forbid what the others list. So does one that requires what it does not list.
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
                return copy  # what must stay open is not known
            reached.append(target)
    for node in nodes:
        if id(node) not in is_open and _lists_all(node):
            node["additionalProperties"] = False
    return copy


def without_unique(schema: Mapping[str, Any]) -> Schema:
    """The schema without `uniqueItems`."""
    copy, nodes = _copied(schema)
    for node in nodes:
        node.pop("uniqueItems", None)
    return copy


def _num_places(node: Schema) -> int:
    """How many parts of a schema may list properties of the same object."""
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
    """A deep copy, and the schemas in it; none of them when there are too many."""
    copy: Schema = json.loads(json.dumps(schema))
    nodes = [copy]
    for node in nodes:  # it grows
        nodes += _children(node)
        if len(nodes) > MAX_NODES:
            return copy, []
    return copy, nodes


def _children(node: Schema) -> Iterator[Schema]:
    for key, value in node.items():
        if key in _OF_SCHEMAS or key in _OF_SCHEMA:
            yield from _schemas_in(value, key in _OF_SCHEMAS)


def _schemas_in(value: Any, is_by_name: bool) -> list[Schema]:
    """The schemas of a keyword: one, or several in a list or by name."""
    if isinstance(value, dict):
        found = list(value.values()) if is_by_name else [value]
    else:
        found = value if isinstance(value, list) else []
    return [item for item in found if isinstance(item, dict)]


def resolved(root: Mapping[str, Any], reference: Any) -> Schema | None:
    """What a reference within the schema points to."""
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
