"""Calls are taken out of a text as it arrives, and how it was cut does not matter."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tools.json_calls import HERMES, LLAMA3_JSON
from common.tools.tool_parser import CallDelta, ToolCallParser, ToolFormat
from tests.common.tools.tool_templates import call_text

NAMES: dict[str, dict[str, object]] = {"get_weather": {}, "get_time": {}}
Call = tuple[str, str]  # a name and arguments


def parsed(
    pieces: list[str], written: ToolFormat = HERMES, is_parallel: bool = True, is_forced: bool = False
) -> tuple[str, list[Call]]:
    """Text and calls, as a client adds them up."""
    parser = ToolCallParser(written, NAMES, is_parallel, is_forced)
    shown = ""
    calls: list[Call] = []
    for piece in pieces:
        text, deltas = parser.push(piece)
        shown += text
        for delta in deltas:
            if delta.name:
                calls.append((delta.name, delta.arguments))
            else:
                assert delta.arguments
                calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return shown + parser.finish(), calls


WEATHER = ("get_weather", '{"city": "</tool_call> \\"}{"}')
TIME = ("get_time", '{"zone": "é\\u00e9", "big": 123456789012345678901234567890}')
WEATHER_TEXT = call_text(*WEATHER)
TIME_TEXT = call_text(*TIME)
QUOTED = json.dumps(TIME[1])  # arguments as some models write them


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"{WEATHER_TEXT}\n{TIME_TEXT}", "", [WEATHER, TIME]),
        (f"{WEATHER_TEXT}{TIME_TEXT}\n", "", [WEATHER, TIME]),
        (f"Let me look.\n\n{WEATHER_TEXT}", "Let me look.", [WEATHER]),
        (f"{TIME_TEXT}\nDone.", "\nDone.", [TIME]),
        (f"\n\n{TIME_TEXT}", "", [TIME]),
        ('<tool_call>{"name":"get_time"}', "", [("get_time", "{}")]),  # without an end
        ('<tool_call>{"name":"get_time", "arguments": {}}\n</tool_', "", [("get_time", "{}")]),
        ('<tool_call>{"name":"get_time"}<tool_call>{"name":"get_time"}', "", [("get_time", "{}")] * 2),
        (f"<tool_call> or {TIME_TEXT}", "<tool_call> or", [TIME]),
        *((text, text, []) for text in (
            "", "plain", "ends with a <tool", " \n", "<tool_call>", "a <tool_call> b </tool_call>\n",
            "<tool_call>\n{'name': 'get_time'}\n</tool_call>", call_text("unknown", "{}"),
            '<tool_call>[{"name": "get_time"}]', '<tool_call>{"a": "\\', '<tool_call>{"name": ["get_time"]}',
            '<tool_call>\n{"name": "get_ti', '<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"name" "get_time"}',
        )),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_a_text(text: str, shown: str, calls: list[Call]) -> None:
    assert parsed([text]) == (shown, calls)
    assert parsed(list(text)) == (shown, calls)


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        (TIME_TEXT.partition("u00e9")[0], "", TIME[1].partition("u00e9")[0]),  # cut
        ('<tool_call>\n{"name": "get_time"', "", ""),
        ('<tool_call>\n{"name": "get_time", "arg', "", ""),
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
        assert parsed(pieces) == (shown, [("get_time", arguments)])


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


LLAMA_TIME = '{"name": "get_time", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (LLAMA_TIME, "", [("get_time", '{"a": 1}')]),
        ('\n{"name": "get_time", "arguments": {"a": 1}}\n', "", [("get_time", '{"a": 1}')]),
        (f'{LLAMA_TIME}; {{"name": "get_weather"}};', "", [("get_time", '{"a": 1}'), ("get_weather", "{}")]),
        (f"{LLAMA_TIME}\n{LLAMA_TIME}", "", [("get_time", '{"a": 1}')] * 2),
        (f"{LLAMA_TIME}; done", "; done", [("get_time", '{"a": 1}')]),
        (f'{LLAMA_TIME};{{"name": "unknown"}}', ';{"name": "unknown"}', [("get_time", '{"a": 1}')]),
        *((text, text, []) for text in (
            '{"answer": 1} ', '{"name": "unknown", "parameters": {}}', 'so: {"name": "get_time", "parameters": {}}',
            '{"name": "get_ti', " \n", "hello ", f";{LLAMA_TIME}",
        )),
    ],
)  # fmt: skip
def test_a_call_without_markers_is_the_answer_itself(text: str, shown: str, calls: list[Call]) -> None:
    assert parsed([text], LLAMA3_JSON) == (shown, calls)
    assert parsed(list(text), LLAMA3_JSON) == (shown, calls)


def test_without_parallel_calls_the_text_ends_with_the_first() -> None:
    for pieces in ([f"a {TIME_TEXT}\n{WEATHER_TEXT} b"], list(f"a {TIME_TEXT}\n{WEATHER_TEXT} b")):
        assert parsed(pieces, is_parallel=False) == ("a", [TIME])
    assert parsed([f"{LLAMA_TIME};{LLAMA_TIME}"], LLAMA3_JSON, is_parallel=False) == ("", [("get_time", '{"a": 1}')])


def test_a_forced_answer_that_was_cut_shows_no_markup() -> None:
    text = f"{TIME_TEXT}\n{TIME_TEXT}"
    for length in range(len(text)):
        shown, calls = parsed([text[:length]], is_forced=True)
        assert shown == ""
        assert len(calls) == text[:length].count('"get_time"')
    assert parsed(['{"name": "get_'], LLAMA3_JSON, is_forced=True) == ("", [])


def test_text_is_shown_at_once_unless_it_may_belong_to_a_call() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert [parser.push(piece)[0] for piece in ("a", " ", "b <", "i> ", "<tool_call>", " no")] == [
        "a", "", " b", " <i>", "", " <tool_call> no",
    ]  # fmt: skip
    unknown = '<tool_call>{"name": "unknown", "arguments": {"a": 1'
    assert parser.push(unknown)[0] == unknown  # it was not offered


def test_a_call_begins_with_its_name_and_goes_on_with_each_piece_of_its_arguments() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    pieces = ['<tool_call>\n{"name": "get_time', '", "argu', 'ments": {"a"', ": ", '"}x', '"}', "}\n</tool_call>"]
    assert [parser.push(piece)[1] for piece in pieces] == [
        [], [CallDelta("get_time", "")], [CallDelta("", '{"a"')], [CallDelta("", ": ")], [CallDelta("", '"}x')],
        [CallDelta("", '"}')], [],
    ]  # fmt: skip


PARTS = st.sampled_from(
    [WEATHER_TEXT, TIME_TEXT, "<tool_call>", "</tool_call>", "<tool_", "{", "}", "[", '"', "\\", "\\ud83d", "\\ude0",
     '{"name": "get_time"}', '{"name": "get_time", "arguments": ', '"{', '{"arguments": ', ', "name": "get_time"',
     ",", ":", " ", "\n", ";", "text", "1", call_text("unknown", "{}"), WEATHER_TEXT[:30]]
)  # fmt: skip


@given(st.lists(PARTS, max_size=12).map("".join), st.data())
def test_how_a_text_was_cut_does_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for written in (HERMES, LLAMA3_JSON):
        for is_parallel in (True, False):
            whole = parsed([text], written, is_parallel)
            assert parsed(pieces, written, is_parallel) == parsed(list(text), written, is_parallel) == whole


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
            assert parsed(list(call_text("get_time", text))) == ("", [("get_time", written)])


@given(st.text(alphabet='<tool_ca>{}"\\ \n', max_size=60))
def test_without_calls_nothing_is_lost(text: str) -> None:
    assert parsed(list(text)) == (text, [])


@pytest.mark.parametrize("filler", ["x", " ", "\\n", "[", "9"])
@pytest.mark.parametrize("begin", ["", '<tool_call>{"a": "', '<tool_call>{"name": "get_time", "arguments": {"a": "'])
def test_long_texts_take_linear_time(begin: str, filler: str) -> None:
    began = time.process_time()
    parser = ToolCallParser(HERMES, NAMES)
    num_read = len(parser.push(begin)[1])
    for _ in range(50_000):
        text, deltas = parser.push(filler)
        num_read += len(text) + sum(len(delta.arguments) for delta in deltas)
    num_read += len(parser.finish())
    assert time.process_time() - began < 1.5  # 0.1 s
    assert num_read >= 50_000


BARE = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
OSLO = ("get_weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (BARE, "", [OSLO]),
        (f"\n{BARE}\n{BARE}\n", "", [OSLO, OSLO]),
        (f"{BARE}\nDone.", "\nDone.", [OSLO]),
        (f"```json\n{BARE}\n```", "", [OSLO]),
        (f"Here:\n```json\n{BARE}\n```\nand ```py\n1\n```", "Here:\nand ```py\n1\n```", [OSLO]),
        (f"<tools>\n{BARE}\n</tools>", "", [OSLO]),
        (f"Say {BARE}", f"Say {BARE}", []),
        ('{"name": "Ann", "age": 4}', '{"name": "Ann", "age": 4}', []),
        ('```json\n{"name": "Ann"}\n```', '```json\n{"name": "Ann"}\n```', []),
        (f"```python\n{BARE}\n```", f"```python\n{BARE}\n```", []),
        ("```json", "```json", []),
    ],
)
def test_calls_without_their_markers(text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text], HERMES) == (shown, calls)
    assert parsed(list(text), HERMES) == (shown, calls)


def test_a_json_answer_is_not_held_back_for_long() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    answer = json.dumps({"title": "x" * 300, "name": "get_weather"})
    shown = [parser.push(letter)[0] for letter in answer[:200]]
    assert len("".join(shown)) > 60
