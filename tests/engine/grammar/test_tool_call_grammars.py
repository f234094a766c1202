"""Answers that a grammar makes calls of tools: whatever it allows is parsed, and follows the schemas."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.reasoning.reasoning_format import HARMONY as CHANNELS
from common.reasoning.reasoning_format import lark_before_answer
from common.reasoning.reasoning_parser import ChannelParser
from common.tools.json_calls import HERMES, LLAMA3_JSON, JsonCalls
from common.tools.literal_calls import FUNCTION_GEMMA, PYTHONIC
from common.tools.named_calls import HARMONY
from common.tools.tool_format import FORMATS, calls_grammar
from common.tools.tool_parser import CallDelta, ToolCallParser, ToolFormat
from tests.common.tools.reading import added_up
from tests.common.tools.tool_templates import call_text
from tests.engine.grammar.matching import DRY_RUN, SCHEMAS, allows, follows, written_by


@pytest.mark.parametrize("written", [written for written, _ in FORMATS.values() if written is not HARMONY], ids=repr)
def test_what_a_grammar_allows_is_parsed_and_follows_the_schemas(written: ToolFormat) -> None:
    followed = calls_grammar(written, SCHEMAS, True, {})
    names = set()
    for seed in range(12):
        parser = ToolCallParser(written, SCHEMAS)
        text, calls = parser.push(DRY_RUN.decode(written_by(followed, seed)))
        assert text + parser.finish() == ""
        assert calls
        assert all(follows(call) for call in calls)
        names |= {call.name for call in calls}
    assert names == set(SCHEMAS)


def test_channels_hold_a_required_call_after_an_analysis() -> None:
    calls = calls_grammar(HARMONY, SCHEMAS, True, {})
    names = set()
    for seed in range(12):
        written = DRY_RUN.decode(written_by(calls, seed))
        reasoning, answer = ChannelParser(has_tools=True).push(written)
        text, found = ToolCallParser(HARMONY, SCHEMAS, is_forced=True).push(answer)
        assert (reasoning, text) == ("", "")
        assert all(follows(CallDelta(*each)) for each in added_up(found))
        names |= {name for name, _ in added_up(found)}
    assert names == set(SCHEMAS)
    before = lark_before_answer(CHANNELS, False, {}, has_header=True)
    call = '<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"zone": "CET"}'
    analysis = "<|channel|>analysis<|message|>The time?<|end|><|start|>assistant"
    assert allows(grammar.after(before, calls), analysis + call)
    assert allows(grammar.after(before, calls), call)
    assert not allows(grammar.after(before, calls), f"{analysis}<|channel|>final<|message|>No.")
    assert not allows(grammar.after(before, calls), f"{call}<|call|><|start|>assistant{call}")


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {"type": ["string", "null"]},
        "at": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "n": {"type": "integer"},
    },
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}},
}


def test_keywords_keep_their_order_and_commas() -> None:
    pythonic = calls_grammar(PYTHONIC, {"f": NESTED}, True, {})
    gemma = calls_grammar(FUNCTION_GEMMA, {"f": NESTED}, True, {})
    for inside, in_gemma, is_allowed in (
        ('who="é", at=[{"x": ")"}], n=1', "who:<escape>é<escape>,at:[{x:<escape>)<escape>}],n:1", True),
        ("who=null, at=[]", "who:null,at:[]", True),
        ("at=[], n=-2", "at:[],n:-2", True),
        ("who=null", "who:null", False),
        ("n=1, at=[]", "n:1,at:[]", False),
        ("at=[]n=1", "at:[]n:1", False),
        (", at=[]", ",at:[]", False),
        ("at=[], n=1.5", "at:[],n:1.5", False),
        ("at=[{}]", "at:[{}]", False),
    ):
        assert allows(pythonic, f"[f({inside})]") is is_allowed, inside
        assert allows(pythonic, f"[f({inside}), f({inside})]") is is_allowed, inside
        assert allows(gemma, f"<start_function_call>call:f{{{in_gemma}}}<end_function_call>") is is_allowed, in_gemma


def test_a_schema_in_itself_cannot_be_written_with_keywords() -> None:
    tree = {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}}}
    with pytest.raises(InvalidRequestError, match="in itself"):
        calls_grammar(FUNCTION_GEMMA, {"f": {**tree, "$defs": {"T": tree}}}, True, {})


def test_parallel_calls_stand_on_lines_of_their_own() -> None:
    one, two = call_text("get_time", '{"zone": "CET"}'), call_text("get_weather", '{"city": "Oslo", "days": 7}')
    for is_parallel in (True, False):
        followed = calls_grammar(HERMES, SCHEMAS, is_parallel, {})
        assert allows(followed, one)
        assert allows(followed, f"{one}\n{two}") is is_parallel
        assert not allows(followed, "no call")
    json_call = '{"name": "get_time", "parameters": {"zone": "UTC"}}'
    assert allows(calls_grammar(LLAMA3_JSON, SCHEMAS, True, {}), json_call)
    assert not allows(calls_grammar(LLAMA3_JSON, SCHEMAS, True, {}), f"{json_call}\n{json_call}")


@pytest.mark.parametrize(
    ("written", "before", "call"),
    [
        (HERMES, "", call_text("get_time", '{"zone": "CET"}')),
        (
            HARMONY,
            "<|channel|>final<|message|>",
            '<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{"zone": "UTC"}',
        ),
    ],
    ids=["hermes", "openai"],
)
def test_a_grammar_may_allow_an_answer_instead(written: ToolFormat, before: str, call: str) -> None:
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    followed = calls_grammar(written, SCHEMAS, True, {}, answer)
    assert allows(followed, before + '{"ok": true}')
    assert allows(followed, call)
    assert not allows(followed, before + '{"no": true}')
    assert allows(followed, '{"ok": true}') is (written is HERMES)


def test_markers_that_are_special_tokens_are_those_tokens() -> None:
    user = DRY_RUN.special_id_of["<user>"]
    written = JsonCalls("<user>", "</tool_call>", "\n")
    text = '<user>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
    assert allows(calls_grammar(written, SCHEMAS, True, {"<user>": user}), text)
    assert not allows(calls_grammar(written, SCHEMAS, True, {}), text)
    token_ids = DRY_RUN.encode(text, allow_special=True)
    assert DRY_RUN.detokenizer().push(token_ids) == text.removeprefix("<user>")
    assert DRY_RUN.detokenizer(shown=frozenset({user})).push([*token_ids, 256]) == text
