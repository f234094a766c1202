"""Texts in which calls follow their schemas: what `strict` asks for where a model decides whether it calls."""

from __future__ import annotations

import json

import pytest

from common.errors import InvalidRequestError
from common.tools.json_calls import LLAMA3_JSON, JsonCalls
from common.tools.literal_calls import LiteralCalls
from common.tools.named_calls import HARMONY
from common.tools.tagged_calls import QWEN3_CODER, TaggedCalls
from common.tools.tool_format import FORMATS, text_and_calls_grammar
from common.tools.tool_parser import CallDelta, ToolCallParser, ToolFormat
from engine.grammar.grammars import Grammars
from tests.engine.grammar.test_tool_call_grammars import (
    ANY_OBJECT,
    DRY_RUN,
    SCHEMAS,
    added_up,
    allows,
    follows,
    written_by,
)

MARKED = [written for written, _ in FORMATS.values() if written.begin and written is not HARMONY]


def first_marker(written: ToolFormat) -> str:
    return written.begin if written.opening.startswith(written.begin) else written.opening or written.begin


@pytest.mark.parametrize("written", MARKED, ids=repr)
def test_in_a_text_what_begins_like_a_call_is_one_and_follows_its_schema(written: ToolFormat) -> None:
    is_marked_each = not written.opening
    # Any text between tags is without an end where nobody ends it.
    schemas = SCHEMAS if isinstance(written, TaggedCalls | LiteralCalls) else {**SCHEMAS, "search": ANY_OBJECT}
    followed = text_and_calls_grammar(written, schemas, True, {})
    marker = first_marker(written)
    assert allows(followed, "")
    assert allows(followed, f"No {marker[:-1]} {{é}}")
    assert not allows(followed, f"{marker} no call")
    names, num_texts_after = set(), 0
    for seed in range(30):
        parser = ToolCallParser(written, schemas)
        text, calls = parser.push(DRY_RUN.decode(written_by(followed, seed, f"I look: {marker}")))
        text += parser.finish()
        assert text.startswith("I look:")
        num_texts_after += text != "I look:"
        for name, arguments in added_up(calls):
            assert isinstance(json.loads(arguments), dict)
            assert name == "search" or follows(CallDelta(name, arguments))
            names.add(name)
    assert names == set(schemas)
    assert (num_texts_after > 0) is is_marked_each


@pytest.mark.parametrize("written", MARKED, ids=repr)
def test_in_a_text_without_parallel_calls_one_call_ends_it(written: ToolFormat) -> None:
    followed = text_and_calls_grammar(written, SCHEMAS, False, {})
    for seed in range(8):
        output = written_by(followed, seed, first_marker(written))
        parser = ToolCallParser(written, SCHEMAS)
        text, calls = parser.push(DRY_RUN.decode(output))
        assert text + parser.finish() == ""
        assert len(added_up(calls)) == 1
        assert not allows(followed, DRY_RUN.decode(output) + "x")


def test_in_a_text_a_call_begins_with_its_special_token_and_with_no_text_that_spells_it() -> None:
    user = DRY_RUN.special_id_of["<user>"]
    written = JsonCalls("<user>", "</tool_call>", "\n")
    followed = text_and_calls_grammar(written, SCHEMAS, True, {"<user>": user})
    call = [user, *DRY_RUN.encode('\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>')]
    for token_ids, is_allowed in (
        ([*b"Hm.", *call], True),
        ([*call, *b"\n", *call, *b" Done."], True),
        ([*call, user, *b"Done."], False),
        ([*b"<user> is a marker."], False),
        ([*b"<use of it"], True),
    ):
        matcher = Grammars(lambda: DRY_RUN, DRY_RUN.vocab_size).start(followed).result()
        assert (matcher.allowed(token_ids) is not None) is is_allowed, token_ids


def test_tags_of_any_object_may_be_called_as_they_like() -> None:
    followed = text_and_calls_grammar(QWEN3_CODER, {"search": ANY_OBJECT}, True, {})
    for inside in ("", "<parameter=q>\n{<é>\n</parameter>\n", "<parameter=q>\n1\n</parameter>\n" * 3):
        assert allows(followed, f"So <tool_call>\n<function=search>\n{inside}</function>\n</tool_call> there")
    for inside in ("q=1", "<parameter=>\n1\n</parameter>\n"):
        assert not allows(followed, f"So <tool_call>\n<function=search>\n{inside}</function>\n</tool_call> there")


def test_calls_that_begin_like_any_text_bind_no_text() -> None:
    with pytest.raises(InvalidRequestError, match="begin like any text"):
        text_and_calls_grammar(LLAMA3_JSON, SCHEMAS, True, {})
