"""Answers that a grammar makes calls of tools: whatever it allows is parsed, and follows the schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.tools.json_calls import HERMES, LLAMA3_JSON, JsonCalls
from common.tools.named_calls import HARMONY
from common.tools.tool_format import FORMATS, calls_grammar
from common.tools.tool_parser import CallDelta, ToolCallParser, ToolFormat
from engine.grammar.grammars import Grammars
from tests.common.tools.tool_templates import call_text

DRY_RUN = load_tokenizer(resolve_model("dry-run"))
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"oneOf": [{"type": "boolean"}, {"const": 7}]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/Zone"}},
    "required": ["zone"],
    "additionalProperties": False,
    "$defs": {"Zone": {"enum": ["CET", "UTC"]}},
}
SCHEMAS = {"get_weather": CITY, "get_time": ZONE}


def written_by(grammar: str, seed: int) -> list[int]:
    """What a random model writes, without blanks where it has the choice."""
    draw = random.Random(seed)
    matcher = Grammars(lambda: DRY_RUN, DRY_RUN.vocab_size).start(grammar).result()
    output: list[int] = []
    while True:
        words = matcher.allowed(output)
        assert words is not None
        allowed = [int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
        token_id = draw.choice([i for i in allowed if chr(i) not in " \t\r\n"] or allowed)
        if token_id in DRY_RUN.eos_token_ids:
            return output
        output.append(token_id)


def follows(call: CallDelta) -> bool:
    arguments: dict[str, Any] = json.loads(call.arguments)
    if call.name == "get_time":
        return list(arguments) == ["zone"] and arguments["zone"] in ("CET", "UTC")
    return (
        set(arguments) == {"city", "days"}
        and arguments["city"] in ("Oslo", "Rome")
        and arguments["days"] in (True, False, 7)
    )


@pytest.mark.parametrize("written", [written for written, _ in FORMATS.values() if written is not HARMONY], ids=repr)
def test_what_a_grammar_allows_is_parsed_and_follows_the_schemas(written: ToolFormat) -> None:
    grammar = calls_grammar(written, SCHEMAS, True, {})
    names = set()
    for seed in range(12):
        parser = ToolCallParser(written, SCHEMAS)
        text, calls = parser.push(DRY_RUN.decode(written_by(grammar, seed)))
        assert text + parser.finish() == ""
        assert calls
        assert all(follows(call) for call in calls)
        names |= {call.name for call in calls}
    assert names == set(SCHEMAS)


def allows(grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    matcher = Grammars(lambda: DRY_RUN, DRY_RUN.vocab_size).start(grammar).result()
    words = matcher.allowed(DRY_RUN.encode(text, allow_special=True))
    eos = DRY_RUN.eos_token_ids[0]
    return words is not None and bool(words[eos // 32] >> (eos % 32) & 1)


def test_parallel_calls_stand_on_lines_of_their_own() -> None:
    one, two = call_text("get_time", '{"zone": "CET"}'), call_text("get_weather", '{"city": "Oslo", "days": 7}')
    for is_parallel in (True, False):
        grammar = calls_grammar(HERMES, SCHEMAS, is_parallel, {})
        assert allows(grammar, one)
        assert allows(grammar, f"{one}\n{two}") is is_parallel
        assert not allows(grammar, "no call")
    json_call = '{"name": "get_time", "parameters": {"zone": "UTC"}}'
    assert allows(calls_grammar(LLAMA3_JSON, SCHEMAS, True, {}), json_call)
    assert not allows(calls_grammar(LLAMA3_JSON, SCHEMAS, True, {}), f"{json_call}\n{json_call}")


def test_a_grammar_may_allow_an_answer_instead() -> None:
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    grammar = calls_grammar(HERMES, SCHEMAS, True, {}, answer)
    assert allows(grammar, '{"ok": true}')
    assert allows(grammar, call_text("get_time", '{"zone": "CET"}'))
    assert not allows(grammar, '{"no": true}')


def test_markers_that_are_special_tokens_are_those_tokens() -> None:
    user = DRY_RUN.special_id_of["<user>"]
    written = JsonCalls("<user>", "</tool_call>", "\n")
    text = '<user>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
    assert allows(calls_grammar(written, SCHEMAS, True, {"<user>": user}), text)
    assert not allows(calls_grammar(written, SCHEMAS, True, {}), text)
    token_ids = DRY_RUN.encode(text, allow_special=True)
    assert DRY_RUN.detokenizer().push(token_ids) == text.removeprefix("<user>")
    assert DRY_RUN.detokenizer(shown=frozenset({user})).push([*token_ids, 256]) == text
