"""Structural tags in both shapes: what they allow, and how mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.grammar.structural_tags import structural_tag
from tests.common.grammar import following

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"begin": "<function=w>", "end": "</function>"}
TAG = {"type": "tag", "content": {"type": "json_schema", "json_schema": CITY}, **CALL}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": [TAG]}
ANY = {"type": "any_text"}
PATTERN = {"type": "string", "pattern": "^a$"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/At"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "$defs": {"At": {"type": "array", "items": {"type": "integer"}}},
}  # fmt: skip
QWEN = {"type": "json_schema", "json_schema": PARAMETERS, "style": "qwen_xml"}
YES_NO = 'root ::= "{" answer{1,2} "}" # }\nanswer ::= "yes" | "no"'
A_CALL = '<function=w>{"city": "x"}</function>'


def const(text: str) -> dict[str, str]:
    return {"type": "const_string", "value": text}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def allows(wanted: dict[str, Any], text: str) -> bool:
    return following.allows(structural_tag(wanted), text)


@pytest.mark.parametrize(
    "wanted", [{"structures": [{"schema": CITY, **CALL}], "triggers": ["<function="]}, {"format": TRIGGERED}]
)
def test_a_trigger_opens_a_structured_part(wanted: dict[str, Any]) -> None:
    for text in ("", "only text, 1 < 2\n", A_CALL, f"text {A_CALL} and {A_CALL}\n"):
        assert allows(wanted, text), text
    for text in ("<function=", "<function=other>{}</function>", "<function=w>{}</function>", A_CALL[:-1]):
        assert not allows(wanted, text), text


@pytest.mark.parametrize(
    ("wanted", "allowed", "others"),
    [
        (TAG, [A_CALL], ["", f"x{A_CALL}"]),
        ({**TRIGGERED, "at_least_one": True}, [f"x {A_CALL} y"], ["x"]),
        ({**TRIGGERED, "stop_after_first": True}, ["x", f"x{A_CALL}"], [f"{A_CALL}{A_CALL}", f"{A_CALL}x"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, [A_CALL], ["x", f"{A_CALL}x"]),
        (
            {"type": "tags_with_separator", "tags": [TAG], "separator": ";"},
            ["", f"{A_CALL};{A_CALL}"],
            [f"{A_CALL};"],
        ),
        (sequence(const("a/\n"), {"type": "regex", "pattern": "[0-9]/"}), ["a/\n1/"], ["1/"]),
        ({"type": "or", "elements": [const("a"), const("é")]}, ["a", "é"], ["aé"]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "plus", "content": const("a")}, ["a", "aa"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aaaa"], ["a"]),
        ({"type": "any_text", "excludes": ["no"]}, ["", "n\no"], ["now"]),
        ({"type": "any_text", "excludes": ["no"], "max_chars": 3}, ["", "é\nx"], ["no", "abcd"]),
        ({"type": "any_text", "max_chars": 0}, [""], ["a"]),
        (
            {"type": "tag", "begin": "<", "content": {"type": "any_text", "max_chars": 2}, "end": ">"},
            ["<>", "<ab>"],
            ["<abc>", "<ab"],
        ),
        ({"type": "grammar", "grammar": YES_NO}, ["{yes}", "{noyes}"], ["", "{}", "{yesyesno}"]),
        (sequence({"type": "grammar", "grammar": YES_NO}, const("!")), ["{yes}!"], ["{yes}"]),
        ({"type": "grammar", "grammar": "start: x\nx: /[a}]/ \"}\""}, ["a}", "}}"], ["a"]),
        (
            {"type": "or", "elements": [{"type": "grammar", "grammar": f'start: "{text}"'} for text in ("a", "b")]},
            ["a", "b"],
            ["ab"],
        ),
        *(
            (
                each,
                [
                    "<parameter=name>Bob</parameter><parameter=age>100</parameter>",
                    "<parameter=name>\n<b>\n</parameter>\n<parameter=age>\n-1\n</parameter>\n",
                    "<parameter=name></parameter><parameter=age>1</parameter><parameter=unit>C</parameter>"
                    "<parameter=at>[1, 2]</parameter><parameter=note>null</parameter>",
                ],
                [
                    "<parameter=age>100</parameter>",
                    "<parameter=name>Bob</parameter><parameter=age>old</parameter>",
                    "<parameter=name>Bob</parameter><parameter=age>1</parameter><parameter=unit>K</parameter>",
                ],
            )
            for each in (QWEN, {"type": "qwen_xml_parameter", "json_schema": PARAMETERS})
        ),
        (
            {**QWEN, "style": "minimax_xml"},
            ['<parameter name="name">Bob</parameter><parameter name="age">100</parameter>'],
            ["<parameter=name>Bob</parameter><parameter=age>100</parameter>"],
        ),
        (
            {**QWEN, "style": "glm_xml"},
            ["<arg_key>name</arg_key><arg_value>Bob</arg_value>\n<arg_key>age</arg_key><arg_value>1</arg_value>"],
            ["<arg_key>name</arg_key><arg_value>Bob</arg_value>"],
        ),
        (
            {"type": "tag", "begin": "<f>", "content": {**QWEN, "json_schema": True}, "end": "</f>"},
            ["<f></f>", "<f>\n<parameter=x>1</parameter></f>"],
            ["<f>1</f>"],
        ),
        (
            {"type": "dispatch", "rules": [["A", const("1")], ["B", const("2")]], "excludes": ["no"]},
            ["", "x", "A1", "xA1yB2z"],
            ["A", "A2", "B2A", "no"],
        ),
        ({"type": "dispatch", "rules": [["A", const("1")]], "loop": False}, ["x", "xA1"], ["A", "A1x"]),
        (
            sequence({"type": "tag", "begin": "<think>", "content": ANY, "end": ["</think>"]}, TRIGGERED),
            [f"<think>a <b> c</think>text{A_CALL}"],
            ["<think>a", "text"],
        ),
        (
            {"type": "tag", "begin": "[", "content": TRIGGERED, "end": "]"},
            ["[]", "[text]", f"[text {A_CALL} text]"],
            ["[", f"[{A_CALL}", "[]]"],
        ),
    ],
)  # fmt: skip
def test_formats(wanted: dict[str, Any], allowed: list[str], others: list[str]) -> None:
    for text in allowed:
        assert allows({"format": wanted}, text), text
    for text in others:
        assert not allows({"format": wanted}, text), text


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "structures and triggers, or a format"),
        ({"structures": [], "triggers": ["<"]}, "structures: must be a list"),
        ({"structures": [{"begin": 1}], "triggers": ["<"]}, r"structures\[0\].begin: must be a string"),
        ({"format": {"type": "token", "token": 3}}, "format: token is not supported"),
        ({"format": {"type": "x"}}, "format: 'x' is not supported"),
        ({"format": {"type": "grammar", "grammar": 'answer ::= "a"'}}, "format: .*valid GBNF"),
        ({"format": {"type": "grammar", "grammar": 'start: "a"\n%llguidance {}'}}, "format: %llguidance"),
        ({"format": {"type": "grammar", "grammar": "root ::= " + '"a" ' * 20_000}}, "more than 65536 characters"),
        ({"format": {"type": "dispatch", "rules": [["", ANY]]}}, r"rules\[0\]: must be a text and the format"),
        ({"format": {"type": "dispatch", "rules": [["a", ANY]]}}, r"rules\[0\]\[1\]: any_text must be the last"),
        ({"format": sequence({"type": "any_text"}, const("a"))}, r"elements\[0\]: any_text must be the last"),
        ({"format": sequence(const("a"), 7)}, r"format.elements\[1\]: must be an object"),
        ({"format": {**TRIGGERED, "triggers": ["<tool"]}}, r"format.tags\[0\]: begins with none of the triggers"),
        ({"format": {**TRIGGERED, "triggers": [""]}}, "must not be empty"),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "max_tokens"),
        ({"format": {"type": "json_schema", "json_schema": CITY, "style": "cohere_xml"}}, "'cohere_xml' is not"),
        ({"format": {"type": "json_schema", "json_schema": CITY, "any_order": True}}, "any_order"),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {"properties": 3}}}, "schema of an object"),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": PATTERN}}}}, "a: pattern of"),
    ],
)  # fmt: skip
def test_mistakes_are_named(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        structural_tag(wanted)
