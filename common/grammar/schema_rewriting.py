"""Rewrites JSON schemas into keywords that llguidance supports. All that a result allows, the original allows, too.

The reverse need not hold: `contains` must be met by one of the first items, many dependencies at once. What cannot be
rewritten stays, and is refused by name. References keep their targets. Knows nothing of grammars.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from common.grammar.negation import Negation, Schema, all_of, any_of
from common.grammar.unique_items import UNIQUE, has_scalars, listed_values

# String formats that llguidance supports. Other formats are annotations, as the standard allows.
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
# String formats as regular expressions: pydantic's UUIDs by version, and RFC 6901.
_UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$"
PATTERNS = {
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
    "json-pointer": "^(?:/(?:[^/~]|~[01])*)*$",
    **dict.fromkeys(("time", "date-time"), "^(?:[^:]*:){2}[0-5]"),  # no leap seconds, which few readers accept
    "duration": "^PT?(?:[0-9]{1,5}[A-Z]T?)+$",  # no numbers of unlimited length
}
# Keywords without effect on validity; x-guidance is an option of llguidance.
ANNOTATIONS = frozenset({
    "$comment", "contentEncoding", "contentMediaType", "default", "deprecated", "description", "examples",
    "markdownDescription", "readOnly", "title", "writeOnly", "x-guidance",
})  # fmt: skip
MAX_CASES = 64  # most cases that one keyword becomes
MAX_DEPENDENCIES = 6  # most dependencies that become two cases each
MAX_NODES = 100_000  # schemas in one rewritten schema; one with more is left unchanged
MAX_UNIQUE = 4  # values of items of which all orders are listed: 65 arrays
MAX_LISTED = 6  # values of items of which all subsets in one order are listed: 64 arrays
NUM_CONTAINS = 3  # first items of an array, one of which must meet `contains`
_BY_NAME = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_INNER = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_IN_PLACE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"})
_IN_NAMES = frozenset({"pattern", "minLength", "maxLength", "not", "anyOf", "allOf", "oneOf", "format", "if"})
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")


class TooManyNodesError(ValueError):
    """A schema that contains, or would become, more than MAX_NODES schemas."""


class Rewriting:
    """Rewrites one document."""

    def __init__(self, resolve: Callable[[Any], Schema | None], marks_unique: bool = False) -> None:
        """resolve: returns the target of a `$ref` in the document, None if unknown."""
        self._marks_unique = marks_unique
        self._resolve = resolve
        self._negation = Negation(resolve, self._spend)
        self._num_nodes = 0
        self._has_prefix_items = True  # the name of this keyword in the schema's draft

    def document(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rewritten schema. Raises TooManyNodesError."""
        draft = str(schema.get("$schema", "2020-12"))
        self._has_prefix_items = "draft-0" not in draft and "2019-09" not in draft
        rewritten = self._schema(schema)
        assert isinstance(rewritten, dict)
        return rewritten

    def _schema(self, schema: Schema) -> Schema:
        if not isinstance(schema, Mapping):
            return schema
        self._spend(1)
        left: dict[str, Any] = {}  # keywords to keep
        for key, value in schema.items():
            if key in ANNOTATIONS or (key == "format" and isinstance(value, str) and value not in FORMATS):
                continue
            left[key] = value
        added: list[Schema] = []  # schemas that must also hold
        if isinstance(known := schema.get("format"), str) and known in PATTERNS:
            added.append({"pattern": PATTERNS[known]})
        for rewrite in _REWRITES:
            added += rewrite(self, left)
        written = {key: self._within(key, value) for key, value in left.items()}
        added = [self._schema(each) for each in added if each is not True]
        if added:
            listed = written.get("allOf")
            written["allOf"] = [*(listed if isinstance(listed, list) else []), *added]
        return written

    def _spend(self, count: int) -> None:
        """Limit the schemas that are written and compared, since nested options multiply: 0.3 s at most."""
        self._num_nodes += count
        if self._num_nodes > MAX_NODES:
            raise TooManyNodesError

    def _within(self, key: str, value: Any) -> Any:
        if key in _BY_NAME and isinstance(value, Mapping):
            return {name: self._schema(each) for name, each in value.items()}
        if key not in _INNER:
            return value
        return [self._schema(each) for each in value] if isinstance(value, list) else self._schema(value)

    # Each removes the keywords that it rewrites from `left`, and yields schemas that replace them.

    def _unevaluated(self, left: dict[str, Any]) -> Iterator[Schema]:
        for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if left.get(key) is True or (key in left and plain in left and not _IN_PLACE & set(left)):
                del left[key]
            elif key in left and not _IN_PLACE & set(left):
                left[plain] = left.pop(key)
        yield from ()

    def _negated(self, left: dict[str, Any]) -> Iterator[Schema]:
        if "not" in left:
            broken = self._negation.of(left["not"])
            if broken is not False or left["not"] is True:
                del left["not"]
                yield broken

    def _condition(self, left: dict[str, Any]) -> Iterator[Schema]:
        then, otherwise = left.pop("then", True), left.pop("else", True)
        condition = left.pop("if", None)
        if condition is not None and (then, otherwise) != (True, True):
            yield any_of([all_of([self._negation.of(condition), otherwise]), all_of([condition, then])])

    def _one_of(self, left: dict[str, Any]) -> Iterator[Schema]:
        options = left.get("oneOf")
        if not isinstance(options, list) or not 1 < len(options) <= MAX_CASES:
            return
        exclusive = []
        for option in options:
            others = [each for each in options if each is not option and not self._are_apart(option, each)]
            broken = [self._negation.of(each) for each in others]
            if not any(self._are_apart(option, each) for each in broken):
                exclusive.append(all_of([option, *broken]))
        if any_of(exclusive) is not False:
            del left["oneOf"]
            yield any_of(exclusive)

    def _are_apart(self, one: Schema, other: Schema) -> bool:
        """Whether no value matches both, judged by types, by values, or by a property that both require."""
        self._spend(1)
        one, other = self._target(one), self._target(other)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        types, others = _types(one), _types(other)
        if types is not None and others is not None and not types & others:
            return True
        values, other_values = _values(one), _values(other)
        if values is not None and other_values is not None:
            return not any(value in other_values for value in values)
        if types != {"object"} or others != {"object"}:
            return False
        needed = set(one.get("required", ())) & set(other.get("required", ()))
        return any(
            self._are_apart(_property(one, name), _property(other, name)) for name in needed if isinstance(name, str)
        )

    def _target(self, schema: Schema) -> Schema:
        for _ in range(8):
            if not isinstance(schema, Mapping) or set(schema) - ANNOTATIONS != {"$ref"}:
                break
            schema = self._resolve(schema["$ref"])
        return schema

    def _dependent(self, left: dict[str, Any]) -> Iterator[Schema]:
        needs: dict[str, list[Schema]] = {}
        for key in _DEPENDENCIES:
            if isinstance(left.get(key), Mapping):
                for name, need in left.pop(key).items():
                    needs.setdefault(name, []).append({"required": need} if isinstance(need, list) else need)
        required = left.get("required", ())
        for name in [name for name in needs if name in required]:
            yield all_of(needs.pop(name))
        groups = [[name] for name in needs] if len(needs) <= MAX_DEPENDENCIES else [list(needs)]
        for group in groups:
            absent = {"properties": dict.fromkeys(group, False)}
            fulfilled = all_of([need for name in group for need in needs[name]])
            present = {"required": group} if len(group) == 1 else True
            yield any_of([absent, all_of([present, fulfilled])])

    def _names(self, left: dict[str, Any]) -> Iterator[Schema]:
        if "propertyNames" not in left:
            return
        names = self._target(left["propertyNames"])
        listed, other = left.get("properties", {}), left.get("additionalProperties", True)
        values = _values(names) if isinstance(names, Mapping) else None
        if values is not None and not _IN_NAMES & set(names) and "patternProperties" not in left:
            del left["propertyNames"]
            texts = dict.fromkeys(value for value in values if isinstance(value, str))
            left["properties"] = {
                **{name: each if name in texts else False for name, each in listed.items()},
                **({name: other for name in texts if name not in listed} if other is not False else {}),
            }
            left["additionalProperties"] = False
            return
        pattern = "" if names is True else _pattern_of_names(names)
        if pattern is None or (pattern and "patternProperties" in left):
            return
        del left["propertyNames"]
        if pattern and other is not False:
            left["patternProperties"] = {pattern: other}
            left["additionalProperties"] = False
        if pattern:
            wrong = [name for name in listed if not re.search(pattern, name)]
            if wrong:
                yield {"properties": dict.fromkeys(wrong, False)}

    def _counted(self, left: dict[str, Any]) -> Iterator[Schema]:
        """Rewrite `minProperties` and `maxProperties`, which llguidance only counts if all listed properties are
        required."""
        listed, required = left.get("properties", {}), left.get("required", [])
        if not isinstance(listed, Mapping) or not isinstance(required, list):
            return
        optional = [name for name, each in listed.items() if name not in required and each is not False]
        least, most = left.get("minProperties", 0), left.get("maxProperties")
        if not optional or not isinstance(least, int) or not isinstance(most, int | None):
            return
        num_required = len(set(required))
        if least <= num_required:
            left.pop("minProperties", None)
        elif least > 1 or most is not None:
            missing = min(least - num_required, len(optional))
            if missing == least - num_required:
                del left["minProperties"]
            yield any_of([{"required": list(names)} for names in _choices(optional, missing)])
        if most is None or "patternProperties" in left:
            return
        if left.get("additionalProperties") is False and most >= len({*listed, *required}):
            del left["maxProperties"]
        elif num_required <= most and (most, least) != (1, 1):
            del left["maxProperties"]
            left["additionalProperties"] = False
            kept = _choices(optional, min(most - num_required, len(optional)))
            yield any_of([{"properties": dict.fromkeys(set(optional) - set(names), False)} for names in kept])

    def _contained(self, left: dict[str, Any]) -> Iterator[Schema]:
        if "contains" not in left or "maxContains" in left:
            return
        contained, least = left.pop("contains"), left.pop("minContains", 1)
        key = "prefixItems" if self._has_prefix_items else "items"
        if least:
            yield any_of([
                {key: [True] * before + [contained] * least, "minItems": before + least}
                for before in range(NUM_CONTAINS)
            ])  # fmt: skip

    def _unique(self, left: dict[str, Any]) -> Iterator[Schema]:
        most = left.get("maxItems")
        if left.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            left.pop("uniqueItems", None)
        if left.get("uniqueItems") is not True:
            return
        items = left.get("items")
        listed = listed_values(items, self._resolve)
        if self._marks_unique and has_scalars(items, self._resolve) and "prefixItems" not in left:
            del left["uniqueItems"]
            left[UNIQUE] = True
            if listed is not None:
                left["maxItems"] = min(len(listed), most if isinstance(most, int) else len(listed))
        elif listed is not None and len(listed) <= MAX_LISTED:
            del left["uniqueItems"]
            ways = itertools.permutations if len(listed) <= MAX_UNIQUE else itertools.combinations
            counts = range(min(len(listed), most if isinstance(most, int) else len(listed)) + 1)
            key = "prefixItems" if self._has_prefix_items else "items"
            yield any_of([
                {key: [{"const": value} for value in way], "minItems": count, "maxItems": count}
                if count
                else {"maxItems": 0}
                for count in counts
                for way in ways(listed, count)
            ])  # fmt: skip


_REWRITES: Sequence[Callable[[Rewriting, dict[str, Any]], Iterator[Schema]]] = (
    Rewriting._unevaluated, Rewriting._names, Rewriting._counted, Rewriting._dependent, Rewriting._condition,
    Rewriting._negated, Rewriting._one_of, Rewriting._contained, Rewriting._unique,
)  # fmt: skip


def _choices(names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return choices of `count` names: all of them if there are few, otherwise runs of adjacent names."""
    ways = list(itertools.islice(itertools.combinations(names, count), MAX_CASES + 1))
    if len(ways) <= MAX_CASES:
        return ways
    starts = range(0, len(names), -(-len(names) // MAX_CASES))
    return [tuple((*names, *names)[start : start + count]) for start in starts]


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        return {"number" if each == "integer" else str(each) for each in named}
    values = _values(schema)
    if values is not None and all(isinstance(value, str) for value in values):
        return {"string"}
    return None


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    listed = schema.get("properties")
    return listed.get(name, True) if isinstance(listed, Mapping) else True


def _pattern_of_names(names: Schema) -> str | None:
    """Return a regular expression of the names that a schema of strings allows; empty: all; None: not expressible."""
    if not isinstance(names, Mapping):
        return None
    said = set(names) - ANNOTATIONS - {"type"}
    if said == {"pattern"}:
        try:
            re.compile(names["pattern"])
        except (re.error, TypeError):
            return None
        return str(names["pattern"])
    if said and said <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None if said else ""
