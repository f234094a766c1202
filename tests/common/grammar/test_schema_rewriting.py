"""Rewritten schemas allow only what the original ones allow, and still something."""

from __future__ import annotations

import decimal
import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest

from common.errors import InvalidRequestError
from common.grammar import grammar, schema_rewriting
from common.grammar.json_schemas import followable
from common.grammar.negation import Negation, other_texts, other_than
from engine.grammar import grammars
from tests.common.grammar.following import allows, random_text

NUMBER, TEXT, FLAG = {"type": "integer"}, {"type": "string", "maxLength": 3}, {"type": "boolean"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def listing(**more: Any) -> dict[str, Any]:
    properties = {"a": NUMBER, "b": TEXT, "c": FLAG}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def listing_of(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 4, **more}


def by_kind(then: Any) -> dict[str, Any]:
    return {"if": {"properties": {"b": {"const": "x"}}, "required": ["b"]}, "then": then}


# A schema, and values that it allows and that stay allowed.
SCHEMAS: list[tuple[dict[str, Any], list[Any]]] = [
    (listing(dependentRequired={"a": ["b"], "c": ["a"]}), [{}, {"b": "x"}, {"a": 1, "b": ""}]),
    ({"$schema": DRAFT_7, **listing(dependencies={"a": ["b"]})}, [{}, {"a": 1, "b": "x"}]),
    (listing(dependentSchemas={"a": {"properties": {"b": {"const": "x"}}}}), [{"a": 1, "b": "x"}, {"b": "y"}]),
    (listing(required=["a"], dependentRequired={"a": ["b"]}), [{"a": 1, "b": "x"}]),
    (
        {"type": "object", "properties": dict.fromkeys("abcdefgh", NUMBER), "additionalProperties": False,
         "dependentRequired": {name: ["h"] for name in "abcdefg"}},
        [{}, {"h": 1}, {"a": 1, "h": 1}],
    ),
    (listing(**by_kind({"required": ["a"]})), [{}, {"b": "y"}, {"a": 1, "b": "x"}]),
    (listing(**by_kind({"required": ["a"]}), **{"else": {"required": ["c"]}}), [{"a": 1, "b": "x"}, {"c": True}]),
    (listing(**{"not": {"required": ["a", "b"]}}), [{}, {"a": 1}, {"b": "x"}]),
    ({"type": "string", "maxLength": 4, "not": {"enum": ["ab", "abc", "x", ""]}}, ["a", "abcd", "xy", "z"]),
    ({"type": ["integer", "null"], "minimum": 0, "maximum": 9, "not": {"enum": [3, 5]}}, [0, 4, 9, None]),
    ({"type": ["integer", "string"], "maxLength": 2, "not": {"type": "string"}}, [7]),
    ({"type": "integer", "minimum": 0, "maximum": 9, "not": {"minimum": 5}}, [0, 4]),
    ({"type": "string", "maxLength": 9, "not": {"anyOf": [{"maxLength": 2}, {"const": "abc"}]}}, ["abd", "abcd"]),
    ({"type": "array", "items": NUMBER, "maxItems": 3, "not": {"maxItems": 1}}, [[1, 2]]),
    ({"type": "object", "propertyNames": {"pattern": "^[ab]{1,2}$"}, "additionalProperties": FLAG}, [{"a": True}]),
    ({"type": "object", "propertyNames": {"enum": ["k", "v"]}, "additionalProperties": NUMBER}, [{"v": 1}]),
    (listing(additionalProperties=True, propertyNames={"enum": ["b"]}), [{}, {"b": "x"}]),
    (listing(minProperties=2), [{"a": 1, "b": "x"}, {"b": "x", "c": True}, {"a": 1, "b": "x", "c": True}]),
    (listing(required=["a"], maxProperties=2), [{"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "c": False}]),
    (listing_of({"type": ["integer", "null"]}, contains={"const": 7}), [[7], [None, 7]]),
    (listing_of(NUMBER, contains={"minimum": 7}, minContains=2), [[8, 9], [1, 8, 9]]),
    ({"$schema": DRAFT_7, **listing_of(NUMBER, contains={"minimum": 7})}, [[8], [1, 8]]),
    (listing_of({"enum": ["x", "y", 3]}, uniqueItems=True), [[], ["y"], [3, "y", "x"]]),
    (listing_of({"type": "boolean"}, uniqueItems=True, minItems=1), [[False], [True, False]]),
    (listing_of({"enum": list("abcdef")}, uniqueItems=True), [[], ["f"], ["a", "c", "d", "f"]]),
    (listing_of(NUMBER, uniqueItems=True), [[], [7], [7, 77, 1]]),
    (listing_of(NUMBER, uniqueItems=True) | {"maxItems": 1}, [[], [7]]),
    (listing_of({"type": "integer", "minimum": 1, "maximum": 20}, uniqueItems=True, minItems=4), [[7, 17, 1, 2]]),
    (listing_of({"type": ["number", "null"]}, uniqueItems=True, minItems=2), [[1.5, None, 2]]),
    (listing_of({"type": "string", "maxLength": 2}, uniqueItems=True, minItems=4), [["a", "ab", "b", ""]]),
    (listing_of({"enum": list("abcdefgh")}, uniqueItems=True, minItems=4), [["h", "a", "c", "b"]]),
    (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/S"}, "b": {"type": "array", "items": FLAG}},
         "required": ["a"], "additionalProperties": {"$ref": "#/$defs/S"},
         "$defs": {"S": listing_of(TEXT, uniqueItems=True)}},
        [{"a": ["x", 'q"'], "b": [True, True], "c": ["x"]}],
    ),
    ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 4}]}, [3, 6]),
    ({"oneOf": [listing(required=["a"]), listing(required=["b"])]}, [{"a": 1}, {"b": "x"}]),
    ({"type": "object", "properties": {"a": NUMBER}, "unevaluatedProperties": False}, [{}, {"a": 1}]),
    ({"type": "string", "format": "json-pointer", "description": "any", "maxLength": 3}, ["/a"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _masks_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the bound on the time of masks, which a busy machine reached once; these tests check allowed values."""
    monkeypatch.setattr(grammars, "ANSWER_SECONDS", 10.0)


def matches(schema: dict[str, Any], value: Any) -> bool:
    return allows(grammar.json_schema(schema), json.dumps(value))


@pytest.mark.parametrize(("schema", "values"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_answers_are_valid_by_the_original(schema: dict[str, Any], values: list[Any]) -> None:
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for value in values:
        judge.validate(value)
        assert matches(schema, value), value
    for seed in range(12):
        text = random_text(grammar.json_schema(schema), seed)
        judge.validate(json.loads(text, parse_float=decimal.Decimal))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (listing(dependentRequired={"a": ["b"]}), {"a": 1}),
        (listing(**by_kind({"required": ["a"]})), {"b": "x"}),
        ({"type": "string", "not": {"const": "ab"}}, "ab"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"b": 1}),
        ({"type": "array", "contains": {"const": 7}}, [1, 2]),
        ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 4}]}, 4),
        (listing(minProperties=2), {"a": 1}),
        (listing_of({"type": "boolean"}, uniqueItems=True), [True, True]),
        (listing_of(NUMBER, uniqueItems=True), [7, 8, 7]),
        (listing_of({"type": "number"}, uniqueItems=True), [7, 7.0]),
        (listing_of(TEXT, uniqueItems=True), ["a", "a"]),
        ({"type": "object", "additionalProperties": listing_of(TEXT, uniqueItems=True)}, {"k": ["a", "b", "a"]}),
        (listing(maxProperties=1), {"a": 1, "b": "x"}),
    ],
)
def test_what_breaks_the_original_is_not_allowed(schema: dict[str, Any], value: Any) -> None:
    assert not matches(schema, value)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "not": {"pattern": "^a"}}, '"not"'),
        ({"type": "array", "contains": NUMBER, "maxContains": 2}, "ontains"),
        ({"type": "object", "propertyNames": {"anyOf": [{"maxLength": 2}]}}, "propertyNames"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        grammar.check_grammar(grammar.json_schema(schema))


def test_other_texts_are_all_but_these() -> None:
    rng = random.Random(0)
    for _ in range(200):
        texts = ["".join(rng.choices('ab]^-\\"\n', k=rng.randrange(4))) for _ in range(rng.randrange(1, 5))]
        pattern = other_texts(texts)
        for _ in range(50):
            text = "".join(rng.choices('ab]^-\\"\n', k=rng.randrange(5)))
            assert bool(re.search(pattern, text)) is (text not in texts) or text.endswith("\n")


def test_negations_break_the_schema() -> None:
    values = [None, False, True, 0, 1, 2.5, "", "a", "ab", [], [1], {}, {"a": 1}, {"a": "x", "b": 1}]
    schemas = [schema for schema, _ in SCHEMAS] + [other_than(values[:9])]
    for schema in schemas:
        negated = Negation(lambda reference: None, lambda count: None).of(schema)
        for value in values:
            if jsonschema.Draft202012Validator(negated).is_valid(value):
                judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
                assert not judge(schema).is_valid(value), (schema, value)


def test_annotations_are_left_out_and_data_is_not() -> None:
    schema = {
        "title": "T", "type": "object", "properties": {"title": {"const": {"title": 1}, "description": "d"}},
        "$defs": {"description": {"type": "string"}},
    }  # fmt: skip
    assert followable(schema) == {
        "type": "object", "properties": {"title": {"const": {"title": 1}}},
        "$defs": {"description": {"type": "string"}},
    }  # fmt: skip


def test_a_schema_of_too_many_schemas_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_rewriting, "MAX_NODES", 10)
    large = {"title": "T", "anyOf": [FLAG] * 20}
    assert followable(large) == large


def _nested(depth: int) -> dict[str, Any]:
    """Make a schema of nested options that refer to the next level, all of which may overlap."""
    levels = {
        f"l{i}": {
            "oneOf": [{"properties": {name: {"$ref": f"#/$defs/l{i + 1}"}}, "required": ["k"]} for name in "abcdefgh"]
        }
        for i in range(depth)
    }
    return {"$ref": "#/$defs/l0", "$defs": {**levels, f"l{depth}": {"enum": list(range(1000))}}}


def _doubled(depth: int) -> dict[str, Any]:
    """Make two equal objects, whose comparison takes 2 to the power of `depth` steps."""
    levels = {
        f"l{i}": {
            "type": "object",
            "properties": {n: {"$ref": f"#/$defs/l{i + 1}"} for n in "ab"},
            "required": ["a", "b"],
        }
        for i in range(depth)
    }
    return {"oneOf": [{"$ref": "#/$defs/l0"}] * 2, "$defs": {**levels, f"l{depth}": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [_nested(12), _doubled(40), {"oneOf": [{"enum": ["x" * 1000] * 100}] * 40}, {"not": {"$ref": "#"}},
     {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}],
)  # fmt: skip
def test_hostile_schemas_are_given_up_soon(schema: dict[str, Any]) -> None:
    began = time.thread_time()
    followable(schema)
    assert time.thread_time() - began < 3.0
