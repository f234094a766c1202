"""Answers that the grammar of a request allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequestError
from router.grammar.answer_format import ResponseFormat, StructuredOutputs, answer_grammar
from tests.common.grammar.following import allows

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a"],
}
VALUE = {"a": 1, "b": [True, False]}


async def format_grammar(strict: bool | None) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}
    return await answer_grammar(ResponseFormat.model_validate(wanted), None, 1)


async def outputs_grammar(**fields: Any) -> str:
    return await answer_grammar(None, StructuredOutputs.model_validate(fields), 1)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (json.dumps(VALUE), True),
        (json.dumps(VALUE, separators=(",", ":")), True),
        (json.dumps(VALUE, indent=4), True),
        (json.dumps(VALUE, indent="\t"), True),
        ('{ "a" : 1 }', True),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
        ('{"a": 1 \n}', False),
        ('{"a": 1}\n', False),
    ],
)
async def test_blanks_between_tokens_are_one_or_an_indentation(text: str, is_allowed: bool) -> None:
    assert allows(await format_grammar(None), text) is is_allowed
    assert allows(await outputs_grammar(json=SCHEMA), text) is is_allowed


async def test_strict_schemas_are_closed() -> None:
    more = '{"a": 1, "c": 2}'
    assert allows(await format_grammar(None), more)
    assert not allows(await format_grammar(True), more)
    assert allows(await format_grammar(True), json.dumps(VALUE))


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["schema", "text"])
async def test_blanks_and_other_properties_can_be_disabled(schema: Any) -> None:
    compact = '{"a":1,"b":[true,false]}'
    more = '{"a":1,"c":2}'
    for closes in (False, True):
        without = await outputs_grammar(
            json=schema, disable_any_whitespace=True, disable_additional_properties=closes
        )
        assert allows(without, compact)
        assert not allows(without, json.dumps(VALUE))
        assert allows(without, more) is not closes
    assert not allows(await outputs_grammar(json_object=True, disable_any_whitespace=True), '{"a": 1}')
    assert allows(await outputs_grammar(regex="a b", disable_any_whitespace=True), "a b")


async def test_a_choice_may_have_thousands_of_texts() -> None:
    texts = [f"text {number}" for number in range(4_000)]
    assert len(str(texts)) < 64_000
    grammar = await outputs_grammar(choice=texts)
    assert all(allows(grammar, text) for text in ("text 3", "text 32", "text 3210"))
    assert not allows(grammar, "text 4000")
    assert not allows(grammar, "text")


async def test_grammars_may_be_gbnf() -> None:
    grammar = await outputs_grammar(grammar='root ::= "yes" | "no" tail*\ntail ::= [0-9]{2} # digits')
    assert [text for text in ("yes", "no", "no1234", "yes12", "no1") if allows(grammar, text)] == [
        "yes",
        "no",
        "no1234",
    ]
    assert allows(await outputs_grammar(grammar='start: "a ::= b"'), "a ::= b")
    with pytest.raises(InvalidRequestError, match=r"GBNF: .*'root'") as refused:
        await outputs_grammar(grammar='answer ::= "yes"')
    assert refused.value.param == "structured_outputs"


async def test_what_is_too_long_is_said_to_be() -> None:
    for fields, limit in (
        ({"json": {"const": "x" * 1_100_000}}, 1 << 20),
        ({"grammar": "root ::= " + '"a" ' * 100_000}, 1 << 16),
    ):
        with pytest.raises(InvalidRequestError, match=f"more than {limit} characters") as refused:
            await answer_grammar(None, StructuredOutputs.model_validate(fields), 4)
        assert refused.value.param == "structured_outputs"


async def test_what_stands_between_tokens_can_be_given() -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        spaced = await outputs_grammar(json=schema, whitespace_pattern="[ ]{2}")
        assert allows(spaced, '{  "a":  1  }')
        assert allows(spaced, '{"a":1}')
        assert not allows(spaced, '{ "a": 1}')
    with pytest.raises(InvalidRequestError, match="whitespace_pattern"):
        await outputs_grammar(json=SCHEMA, whitespace_pattern=" ", disable_any_whitespace=True)
    with pytest.raises(InvalidRequestError, match="structured_outputs: the grammar is not valid"):
        await outputs_grammar(json=SCHEMA, whitespace_pattern="(")


async def test_structural_tags_come_as_a_format_or_as_a_text() -> None:
    parts = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
    tag = {"type": "structural_tag", **parts}
    wanted = ResponseFormat.model_validate(tag)
    for found in (
        await answer_grammar(wanted, None, 1),
        await outputs_grammar(structural_tag=parts),
        await outputs_grammar(structural_tag=json.dumps(tag)),
    ):
        assert allows(found, 'text <f>{"a": 1}</f>')
        assert not allows(found, "text <f>")
    with pytest.raises(InvalidRequestError, match=r"response_format: structures.*one"):
        await answer_grammar(ResponseFormat(type="structural_tag", structures=[]), None, 1)
    with pytest.raises(InvalidRequestError, match="triggers: of structural tags"):
        ResponseFormat(type="text", triggers=["<f"])
