"""Calls are parsed from a text as it arrives; how it was split does not matter."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tools.json_calls import HERMES, LLAMA3_JSON
from common.tools.tool_parser import CallDelta, ToolCallParser
from tests.common.tools.reading import FUNCTIONS, parsed
from tests.common.tools.tool_templates import call_text

WEATHER = ("get_weather", '{"city": "</tool_call> \\"}{"}')
TIME = ("get_time", '{"zone": "é\\u00e9", "big": 123456789012345678901234567890}')
WEATHER_TEXT = call_text(*WEATHER)
TIME_TEXT = call_text(*TIME)
QUOTED = json.dumps(TIME[1])  # arguments as some models write them


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        (TIME_TEXT.partition("u00e9")[0], "", TIME[1].partition("u00e9")[0]),  # cut
        ('<tool_call>\n{"name": "get_time"', "", "{}"),
        ('<tool_call>\n{"name": "get_time", "arg', "", "{}"),
        (call_text("get_time", '{"a": NaN}'), "", '{"a": NaN}'),  # broken
        (call_text("get_time", "[1]"), "", "[1]"),
        (call_text("get_time", "null"), "", "null"),
        (call_text("get_time", '{"a": ' * 3000 + "1" + "}" * 3000), "", '{"a": ' * 3000 + "1" + "}" * 3000),
        ('<tool_call>{"name": "get_time", oops "arguments": {}}</tool_call>!', "!", "{}"),
        ('<tool_call>{"name": "get_time", , : "arguments": {"a": 1}}', "", "{}"),
        ('<tool_call>{"name": "get_time", "arguments": }', "", "{}"),
        (
            '<tool_call>{"name": "get_time", "arguments": {"a": 1}\n</tool_call>.',
            ".",
            '{"a": 1}',
        ),  # a brace is missing
        ('<tool_call>{"name": "get_time", "arguments": {"a": [1}\n</tool_call>.', ".", '{"a": [1}\n'),
        ('<tool_call>{"name": "get_time", "arguments": nu</tool_call>.', ".", "nu"),
    ],
)
def test_behind_its_name_a_call_stays_one(text: str, shown: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        assert parsed(pieces, HERMES) == (shown, [("get_time", arguments)])


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        (f'"name": "get_time", "arguments": {QUOTED}', TIME[1]),
        (f'"arguments": {QUOTED}, "name": "get_time"', TIME[1]),
        ('"name": "get_time", "arguments": "{}"', "{}"),
        (
            r'"name": "get_time", "arguments": "\ud83d\ude00 \\u\ud83d\\ \ud83dx\ud83d"',
            "😀 \\u\ufffd\\ \ufffdx\ufffd",
        ),
        (r'"name": "get_time", "arguments": "\u12 \x\u00e9"', "\\u12 \\xé"),
        ('"name": "get_time", "arguments": ""', "{}"),
        (r'"n\u0061me": "get\u005ftime"', "{}"),
        ('"type": "function", "id": {"x": ["}"]}, "name": "get_time", "parameters": {"a": 1}', '{"a": 1}'),
        ('"arguments": {"a": 1}, "name": "get_time"', '{"a": 1}'),
        ('"name": "get_time", "name": "unknown", "arguments": {}, "parameters": {"a": 1}', "{}"),
    ],
)
def test_members_of_a_call(members: str, arguments: str) -> None:
    for written, text in ((HERMES, f"<tool_call>{{{members}}}</tool_call>"), (LLAMA3_JSON, f"{{{members}}}")):
        assert parsed([text], written) == parsed(list(text), written) == ("", [("get_time", arguments)])


def test_a_forced_answer_that_was_cut_shows_no_markup() -> None:
    text = f"{TIME_TEXT}\n{TIME_TEXT}"
    for length in range(len(text)):
        shown, calls = parsed([text[:length]], HERMES, is_forced=True)
        assert shown == ""
        assert len(calls) == text[:length].count('"get_time"')
    assert parsed(['{"name": "get_'], LLAMA3_JSON, is_forced=True) == ("", [])


def test_text_is_shown_at_once_unless_it_may_belong_to_a_call() -> None:
    parser = ToolCallParser(HERMES, FUNCTIONS)
    assert [parser.push(piece)[0] for piece in ("a", " ", "b <", "i> ", "<tool_call>", " no")] == [
        "a", "", " b", " <i>", "", " <tool_call> no",
    ]  # fmt: skip
    unknown = '<tool_call>{"name": "unknown", "arguments": {"a": 1'
    assert parser.push(unknown)[0] == unknown  # it was not offered


def test_a_call_begins_with_its_name_and_goes_on_with_each_piece_of_its_arguments() -> None:
    parser = ToolCallParser(HERMES, FUNCTIONS)
    pieces = ['<tool_call>\n{"name": "get_time', '", "argu', 'ments": {"a"', ": ", '"}x', '"}', "}\n</tool_call>"]
    assert [parser.push(piece)[1] for piece in pieces] == [
        [], [CallDelta("get_time", "")], [CallDelta("", '{"a"')], [CallDelta("", ": ")], [CallDelta("", '"}x')],
        [CallDelta("", '"}')], [],
    ]  # fmt: skip


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(), value, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_arguments_of_every_json_value_are_complete(value: object) -> None:
    for is_ascii in (True, False):
        written = json.dumps({"value": value}, ensure_ascii=is_ascii)
        for text in (written, json.dumps(written, ensure_ascii=is_ascii)):
            assert parsed(call_text("get_time", text), HERMES) == ("", [("get_time", written)])


@given(st.text(alphabet='<tool_ca>{}"\\ \n', max_size=60))
def test_without_calls_nothing_is_lost(text: str) -> None:
    assert parsed(text, HERMES) == (text, [])


@pytest.mark.parametrize("filler", ["x", " ", "\\n", "[", "9"])
@pytest.mark.parametrize("begin", ["", '<tool_call>{"a": "', '<tool_call>{"name": "get_time", "arguments": {"a": "'])
def test_long_texts_take_linear_time(begin: str, filler: str) -> None:
    began = time.process_time()
    parser = ToolCallParser(HERMES, FUNCTIONS)
    num_read = len(parser.push(begin)[1])
    for _ in range(50_000):
        text, deltas = parser.push(filler)
        num_read += len(text) + sum(len(delta.arguments) for delta in deltas)
    num_read += len(parser.finish())
    assert time.process_time() - began < 1.5  # 0.1 s
    assert num_read >= 50_000


def test_a_json_answer_is_not_held_back_for_long() -> None:
    parser = ToolCallParser(HERMES, FUNCTIONS)
    answer = json.dumps({"title": "x" * 300, "name": "get_weather"})
    shown = [parser.push(letter)[0] for letter in answer[:200]]
    assert len("".join(shown)) > 60
