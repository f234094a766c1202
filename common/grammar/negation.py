"""Negates JSON schemas, for `not`, `if` and `oneOf`, which llguidance does not support.

Every value of the negation violates the schema, but it need not contain all that do: where the opposite of a keyword
cannot be written (`pattern`, `additionalProperties`), another keyword must be violated. So answers stay valid.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Any  # an object, or true or false
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_DEPTH = 12  # of references and nested schemas
# Keyword: type of the bounded values, keyword of the opposite bound, and step to its value.
_OPPOSITE_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


class Negation:
    """Negates the schemas of one document."""

    def __init__(self, resolve: Callable[[Any], Schema | None], spend: Callable[[int], None]) -> None:
        """resolve: returns the target of a `$ref`, None if unknown. spend: is told how many schemas and values are
        used."""
        self._resolve = resolve
        self._spend = spend

    def of(self, schema: Schema, depth: int = 0) -> Schema:
        """Return a schema whose values all violate this one; False if none can be written."""
        self._spend(1)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return False
        return any_of(list(self._broken(schema, depth + 1)))

    def _broken(self, schema: Mapping[str, Any], depth: int) -> Iterator[Schema]:
        """Yield one schema for each keyword that can be violated."""
        for key, value in schema.items():
            match key, value:
                case "type", str() | list():
                    yield _other_types(value)
                case "const", _:
                    self._spend(len(str(value)) // 8)
                    yield other_than([value])
                case "enum", list():
                    self._spend(len(str(value)) // 8)
                    yield other_than(value)
                case "required", list():
                    yield from ({"type": "object", "properties": {name: False}} for name in value)
                case "properties", dict():
                    for name, inner in value.items():
                        broken = self.of(inner, depth)
                        if broken is not False:
                            yield {"type": "object", "properties": {name: broken}, "required": [name]}
                case "items", dict() | bool() if "prefixItems" not in schema:
                    broken = self.of(value, depth)
                    if broken is not False:
                        yield {"type": "array", "items": broken, "minItems": 1}
                case "anyOf" | "oneOf", list():
                    yield all_of([self.of(each, depth) for each in value])
                case "allOf", list():
                    yield any_of([self.of(each, depth) for each in value])
                case "not", _:
                    yield value
                case "$ref", str():
                    yield self.of(self._resolve(value), depth)
                case "minProperties", 1:
                    yield {"type": "object", "maxProperties": 0}
                case _ if key in _OPPOSITE_BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
                    of_type, opposite, step = _OPPOSITE_BOUNDS[key]
                    if value + step >= 0 or of_type == "number":
                        yield {"type": of_type, opposite: value + step}


def any_of(options: list[Schema]) -> Schema:
    """Return a simplified schema of values that at least one option allows."""
    if any(option is True or option == {} for option in options):
        return True
    options = [option for option in options if option is not False]
    return {"anyOf": options} if len(options) > 1 else options[0] if options else False


def all_of(parts: list[Schema]) -> Schema:
    """Return a simplified schema of values that all parts allow."""
    if any(part is False for part in parts):
        return False
    parts = [part for part in parts if part is not True and part != {}]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def other_than(values: list[Any]) -> Schema:
    """Return a schema of values that equal none of these. All arrays are excluded if one is listed; objects, too."""
    options: list[Schema] = [{"type": "array"}, {"type": "object"}]
    options = [option for option in options if not any(_type_of(value) == option["type"] for value in values)]
    if None not in values:
        options.append({"type": "null"})
    options += [{"const": flag} for flag in (False, True) if not any(value is flag for value in values)]
    texts = [value for value in values if isinstance(value, str)]
    options.append({"type": "string", "pattern": other_texts(texts)} if texts else {"type": "string"})
    numbers = sorted({value for value in values if _type_of(value) == "number"})
    if not numbers:
        return any_of([*options, {"type": "number"}])
    options.append({"type": "number", "exclusiveMaximum": numbers[0]})
    options += [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    return any_of([*options, {"type": "number", "exclusiveMinimum": numbers[-1]}])


def other_texts(texts: list[str]) -> str:
    """Return a regular expression of all texts but these, without look-around: each way to leave their tree."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^{_leaving(tree)}$"


def _leaving(tree: dict[str, Any]) -> str:
    following = [character for character in tree if character]
    if not following:  # the end of a text: more must follow
        return r"[\s\S]+"
    ways = [f"[^{''.join(map(_in_class, following))}][\\s\\S]*"]
    ways += [re.escape(character) + _leaving(tree[character]) for character in following]
    return f"(?:{'|'.join(ways)})" + ("" if "" in tree else "?")


def _in_class(character: str) -> str:
    return character if character.isalnum() else f"\\u{ord(character):04x}" if ord(character) < 1 << 16 else character


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _other_types(value: str | list[str]) -> Schema:
    named = {value} if isinstance(value, str) else set(value)
    left = [each for each in TYPES if each not in named and each != "integer"]  # integers are numbers
    if "integer" in named and "number" in left:
        left.remove("number")
    return {"type": left} if left else False
