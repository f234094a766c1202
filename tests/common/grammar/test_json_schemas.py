"""Schemas are closed where that excludes no intended value, and unsupported formats are left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.grammar import grammar
from common.grammar.json_schemas import MAX_NODES, closed, followable
from common.grammar.schema_rewriting import FORMATS

INTEGER = {"type": "integer"}


def listing(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **more}


def is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False


def test_objects_that_list_their_properties_are_closed_at_any_depth() -> None:
    inner = {"type": "array", "items": listing("x")}
    schema = listing("a", properties={"inner": inner, "either": {"anyOf": [listing("y"), {"type": "null"}]}})
    found = closed(schema)
    assert is_closed(found)
    assert is_closed(found["properties"]["inner"]["items"])
    assert is_closed(found["properties"]["either"]["anyOf"][0])
    assert "additionalProperties" not in schema  # the caller's is not touched
    assert "additionalProperties" not in inner["items"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "patternProperties": {"^x": INTEGER}},
        listing("a", additionalProperties=True),
        listing("a", additionalProperties=INTEGER),
        listing("a", unevaluatedProperties=True),
        listing("a", required=["b"]),
        listing("a", minProperties=2),
        listing("a", anyOf=[listing("b"), listing("c")]),
        listing("a", **{"if": listing("a"), "then": listing("b")}),
        listing("a", dependentSchemas={"a": listing("b")}),
        {"allOf": [listing("a"), listing("b")]},
        {"allOf": [{"$ref": "#/$defs/A"}, listing("b")], "$defs": {"A": listing("a")}},
        {**listing("b"), "$ref": "#/$defs/A~1%41", "$defs": {"A/A": listing("a")}},
        {"allOf": [{"$ref": "#/$defs/L/allOf/0"}, listing("b")], "$defs": {"L": {"allOf": [listing("a")]}}},
        {"allOf": [{"anyOf": [listing("a"), listing("c")]}, listing("b")]},
        {"allOf": [{"$ref": "#name"}, listing("b")], "$defs": {"A": {"$anchor": "name", **listing("a")}}},
        {"enum": [listing("a")]},
        {"const": {"items": listing("a")}, "default": listing("a"), "examples": [listing("a")]},
        listing(additionalProperties=True, **{"x-properties": listing("a")}),
        {"type": "array", "items": "no schema", "allOf": {}, "anyOf": [True]},
    ],
)
def test_what_closing_would_break_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_definition_is_closed_unless_one_of_its_uses_adds_properties() -> None:
    defs = {"A": listing("a"), "B": listing("b")}
    schema = listing("x", properties={"a": {"$ref": "#/$defs/A"}, "b": {"allOf": [{"$ref": "#/$defs/B"}]}})
    found = closed({**schema, "$defs": defs})
    assert is_closed(found["$defs"]["A"])
    assert is_closed(found["$defs"]["B"])
    schema["properties"]["ab"] = {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    found = closed({**schema, "$defs": defs})
    assert is_closed(found)
    assert found["$defs"] == defs


def test_a_property_may_be_called_like_a_keyword() -> None:
    found = closed(listing(properties={"properties": listing("a"), "format": {"type": "string", "format": "color"}}))
    assert list(found["properties"]) == ["properties", "format"]
    assert is_closed(found)
    assert is_closed(found["properties"]["properties"])
    assert followable(found)["properties"]["format"] == {"type": "string"}


def test_recursive_and_large_schemas_end() -> None:
    tree = listing("a", properties={"children": {"type": "array", "items": {"$ref": "#"}}})
    assert is_closed(closed(tree))
    loop = {"allOf": [{"$ref": "#"}, listing("a")]}
    assert closed(loop) == loop
    large = {"anyOf": [listing("a")] * MAX_NODES}
    assert closed(large) == large


def test_the_formats_are_those_that_can_be_followed() -> None:
    for name in FORMATS:
        grammar.check_grammar(f'json_schema:{{"type": "string", "format": "{name}"}}')
    for name in ("int32", "color", "idn-email", "iri", "uri-reference", "regex", "binary", "password"):
        assert followable({"type": "string", "format": name}) == {"type": "string"}
        grammar.check_grammar(grammar.json_schema({"type": "string", "format": name}))
        grammar.check_grammar(grammar.json_schema(json.dumps({"type": "string", "format": name})))
        grammar.check_grammar(grammar.lark("start: " + grammar.json_rule({"type": "string", "format": name})))
