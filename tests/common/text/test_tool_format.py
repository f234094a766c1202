"""How models write calls: recognized in templates, parsed from pieces of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.text.grammar import check_grammar
from common.text.tool_format import (
    HERMES,
    LLAMA3_JSON,
    ParsedCall,
    ToolCallParser,
    ToolFormat,
    calls_grammar,
    tool_format,
)
from tests.common.text.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, call_text

NAMES = ("get_weather", "get_time")

# -- templates -------------------------------------------------------------------------------------------------


def test_formats_are_recognized_from_templates() -> None:
    assert tool_format(HERMES_TEMPLATE) is HERMES
    assert tool_format(LLAMA3_TEMPLATE) is LLAMA3_JSON
    hermes2 = "{{ tools }}<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>"
    assert tool_format(hermes2) is HERMES


@pytest.mark.parametrize(
    "shown",
    [
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",  # GLM
        "<tool_call>\\n<function=example_function_name>\\n<parameter=p>",  # Qwen3-Coder
        "[TOOL_CALLS][{'name': name, 'arguments': arguments}]",  # Mistral
        "<｜tool▁calls▁begin｜>",  # DeepSeek
    ],
)
def test_other_formats_are_refused(shown: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read the calls") as refused:
        tool_format("{% if tools %}{{ tools }}" + shown + "{% endif %}")
    assert refused.value.param == "tools"


def test_a_template_without_tools_takes_none() -> None:
    with pytest.raises(InvalidRequestError, match="takes no tools"):
        tool_format("{% for message in messages %}<tool_call>{'name'{% endfor %}")


def test_a_schema_that_cannot_be_followed_is_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="not"):
        check_grammar(calls_grammar(HERMES, {"f": {"type": "object", "not": {}}}, True, {}))


# -- parsing ---------------------------------------------------------------------------------------------------


def parsed(pieces: list[str], written: ToolFormat = HERMES, is_parallel: bool = True) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser(written, NAMES, is_parallel)
    shown, found = "", []
    for piece in pieces:
        text, calls = parser.push(piece)
        shown += text
        found += calls
    return shown + parser.finish(), found


WEATHER = ParsedCall("get_weather", '{"city": "</tool_call> \\"}{"}')
TIME = ParsedCall("get_time", '{"zone": "é\\u00e9", "big": 123456789012345678901234567890}')
WEATHER_TEXT = call_text(WEATHER.name, WEATHER.arguments)
TIME_TEXT = call_text(TIME.name, TIME.arguments)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"{WEATHER_TEXT}\n{TIME_TEXT}", "", [WEATHER, TIME]),
        (f"{WEATHER_TEXT}{TIME_TEXT}\n", "", [WEATHER, TIME]),
        (f"Let me look.\n\n{WEATHER_TEXT}", "Let me look.", [WEATHER]),
        (f"{TIME_TEXT}\nDone.", "\nDone.", [TIME]),
        (f"\n\n{TIME_TEXT}", "", [TIME]),
        ('<tool_call>{"name":"get_time"}', "", [ParsedCall("get_time", "{}")]),  # without an end
        ('<tool_call>{"name":"get_time", "arguments": {}}\n</tool_', "", [ParsedCall("get_time", "{}")]),
        ('<tool_call>{"name":"get_time"}<tool_call>{"name":"get_time"}', "", [ParsedCall("get_time", "{}")] * 2),
        (f"<tool_call> or {TIME_TEXT}", "<tool_call> or", [TIME]),
        ('{"name": "get_time", "arguments": {}}', '{"name": "get_time", "arguments": {}}', []),
        *((text, text, []) for text in (
            "", "plain", "ends with a <tool", " \n", "<tool_call>", "a <tool_call> b </tool_call>\n",
            "<tool_call>\n{'name': 'get_time'}\n</tool_call>", call_text("unknown", "{}"),
            call_text("get_time", "[1]"), call_text("get_time", '"{}"'), call_text("get_time", "null"),
            call_text("get_time", '{"a": NaN}'), call_text("get_time", '{"a": "\\ud800"}'),
            call_text("get_time", '{"a": ' * 3000 + "1" + "}" * 3000), '<tool_call>[{"name": "get_time"}]',
            TIME_TEXT[:40], '<tool_call>{"a": "\\',
        )),
    ],
)  # fmt: skip
def test_calls_are_taken_out_of_a_text(text: str, shown: str, calls: list[ParsedCall]) -> None:
    assert parsed([text]) == (shown, calls)
    assert parsed(list(text)) == (shown, calls)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "get_time", "parameters": {"a": 1}}', "", [ParsedCall("get_time", '{"a": 1}')]),
        ('\n{"name": "get_time", "arguments": {"a": 1}}\n', "", [ParsedCall("get_time", '{"a": 1}')]),
        ('{"type": "function", "name": "get_time"}', "", [ParsedCall("get_time", "{}")]),
        *((text, text, []) for text in (
            '{"answer": 1} ', '{"name": "unknown", "parameters": {}}', 'so: {"name": "get_time", "parameters": {}}',
            '{"name": "get_time", "para', " \n", "hello ",
        )),
    ],
)  # fmt: skip
def test_a_call_without_markers_is_the_answer_itself(text: str, shown: str, calls: list[ParsedCall]) -> None:
    assert parsed([text], LLAMA3_JSON) == (shown, calls)
    assert parsed(list(text), LLAMA3_JSON) == (shown, calls)


def test_without_parallel_calls_the_text_ends_with_the_first() -> None:
    for pieces in ([f"a {TIME_TEXT}\n{WEATHER_TEXT} b"], list(f"a {TIME_TEXT}\n{WEATHER_TEXT} b")):
        assert parsed(pieces, is_parallel=False) == ("a", [TIME])


def test_text_is_shown_at_once_unless_it_may_belong_to_a_call() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert [parser.push(piece)[0] for piece in ("a", " ", "b <", "i> ", "<tool_call>", " no")] == [
        "a", "", " b", " <i>", "", " <tool_call> no",
    ]  # fmt: skip
    assert parser.push(TIME_TEXT.removesuffix("\n</tool_call>"))[1] == [TIME]  # the end marker is not waited for


PARTS = st.sampled_from(
    [WEATHER_TEXT, TIME_TEXT, "<tool_call>", "</tool_call>", "<tool_", "{", "}", '"', "\\", '{"name": "get_time"}',
     " ", "\n", "text", call_text("unknown", "{}"), WEATHER_TEXT[:30]]
)  # fmt: skip


@given(st.lists(PARTS, max_size=12).map("".join), st.data())
def test_how_a_text_was_cut_does_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for written in (HERMES, LLAMA3_JSON):
        for is_parallel in (True, False):
            assert parsed(pieces, written, is_parallel) == parsed([text], written, is_parallel)


@given(st.text(alphabet='<tool_ca>{}"\\ \n', max_size=60))
def test_without_calls_nothing_is_lost(text: str) -> None:
    assert parsed(list(text)) == (text, [])
