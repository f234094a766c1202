"""Texts in which calls follow their schemas: what `strict` asks for where a model decides whether it calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import permutations

import pytest

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.reasoning.reasoning_format import HARMONY as CHANNELS
from common.reasoning.reasoning_format import lark_before_answer
from common.reasoning.reasoning_parser import ChannelParser
from common.tools.json_calls import HERMES, LLAMA3_JSON, JsonCalls
from common.tools.literal_calls import PYTHONIC, LiteralCalls
from common.tools.named_calls import HARMONY
from common.tools.tagged_calls import QWEN3_CODER, TaggedCalls
from common.tools.tool_format import FORMATS, text_and_calls_grammar
from common.tools.tool_parser import CallDelta, ToolCallParser, ToolFormat
from tests.common.tools.reading import added_up
from tests.common.tools.tool_templates import call_text
from tests.engine.grammar.matching import (
    ANY_OBJECT,
    DRY_RUN,
    EOS,
    GRAMMARS,
    SCHEMAS,
    ZONE,
    allows,
    follows,
    may_end,
    written_by,
)

MARKED = [written for written, _ in FORMATS.values() if written.begin and written is not HARMONY]


def first_marker(written: ToolFormat) -> str:
    return written.begin if written.opening.startswith(written.begin) else written.opening or written.begin


@pytest.mark.parametrize("written", MARKED, ids=repr)
def test_in_a_text_what_begins_like_a_call_is_one_and_follows_its_schema(written: ToolFormat) -> None:
    is_marked_each = not written.opening
    # Free text between tags would never end, because a random model does not end it.
    schemas = SCHEMAS if isinstance(written, TaggedCalls | LiteralCalls) else {**SCHEMAS, "search": ANY_OBJECT}
    followed = text_and_calls_grammar(written, schemas, True, {})
    marker = first_marker(written)
    assert allows(followed, "")
    assert allows(followed, f"No {marker[:-1]} {{é}}")
    assert not allows(followed, f"{marker} no call")
    names, num_texts_after = set(), 0
    for seed in range(12):
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
    for seed in range(4):
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
        matcher = GRAMMARS.start(followed).result()
        assert (matcher.allowed(token_ids) is not None) is is_allowed, token_ids


def test_calls_without_their_special_token_are_bound_beside_those_with_it() -> None:
    followed = text_and_calls_grammar(HERMES, SCHEMAS, True, {"<tool_call>": IDS["<|start|>"]})
    for text, told in HERMES_TEXTS.items():
        assert may_end(followed, with_markers(text.replace("<tool_call>", "<|start|>"))) == told
    for spelled in ("Hm <tool_call>", "{} <tool_call>"):
        assert may_end(followed, with_markers(spelled)) == (False, False)


def test_tags_of_any_object_may_be_called_as_they_like() -> None:
    followed = text_and_calls_grammar(QWEN3_CODER, {"search": ANY_OBJECT}, True, {})
    for inside in ("", "<parameter=q>\n{<é>\n</parameter>\n", "<parameter=q>\n1\n</parameter>\n" * 3):
        assert allows(followed, f"So <tool_call>\n<function=search>\n{inside}</function>\n</tool_call> there")
    for inside in ("q=1", "<parameter=>\n1\n</parameter>\n"):
        assert not allows(followed, f"So <tool_call>\n<function=search>\n{inside}</function>\n</tool_call> there")


# -- formats whose calls may have no marker ------------------------------------------------------------

CALL = '{"name": "get_time", "parameters": {"zone": "CET"}}'
JSON_TEXTS = {  # and whether an answer may begin so, and end there
    "": (True, True),
    "No {é} [get_time(": (True, True),
    f"So: {CALL}": (True, True),  # calls stand at the beginning
    '{"zone": 1, "name": "Rome", "a": "\\u00e9"}': (True, True),
    '{"name": "get_timer"}': (True, True),
    f"[{CALL}]": (True, True),
    CALL: (True, True),
    CALL.replace(" ", ""): (True, True),
    CALL.replace("parameters", "arguments"): (True, True),
    '\n{"type": "function", "name": "get_time",\n "parameters": {"zone": "UTC"}\n}': (True, True),
    f"{CALL}; {CALL}": (True, True),
    CALL[:-1]: (True, False),
    '{"name": "get_time"': (True, False),
    '{"name": "get_time"}': (False, False),
    CALL.replace("CET", "EST"): (False, False),
    CALL.replace('"CET"', "7"): (False, False),
    f"{CALL} and": (False, False),
    '{"zone": 1, "name": "get_time"': (False, False),
    '{"name": "get\\u005ftime"': (False, False),
    '{"name": "other"; {"name" : "get_time"': (False, False),
}


def tool_code(calls: str) -> str:
    return f"```tool_code\n{calls}\n```"


CALLED = '[get_time(zone="CET")]'
PYTHON_TEXTS = {
    "": (True, True),
    f"So: {CALLED}": (True, True),
    "[1, 2]": (True, True),
    "[get_timer(1)]": (True, True),
    "[get_time": (True, True),
    CALLED: (True, True),
    f"\n{CALLED}": (True, True),
    '[get_time(zone="UTC"), get_weather(city="Oslo", days=7)]': (True, True),
    '[get_time(zone="UTC")': (True, False),
    "[get_time(": (True, False),
    '[get_time(zone="E': (False, False),
    "[get_time(zone=1": (False, False),
    "[get_time()": (False, False),
    "[get_weather(days=7": (False, False),
    f"{CALLED} and": (False, False),
    " [ get_time (": (False, False),
    f"So:\n{tool_code(CALLED[1:-1])}": (True, True),
    tool_code(f"print({CALLED[1:-1]})\n{CALLED[1:-1]}") + f" And {tool_code(CALLED[1:-1])} so.": (True, True),
    "```tool_code\nget_time(": (True, False),
    "```tool_code\nget_time()": (False, False),
    '```tool_code\nprint(get_time(zone="E': (False, False),
    "```tool_code\nx": (False, False),
    "```tool_code ": (False, False),
    f"{tool_code(CALLED[1:-1])} ```tool_code\nget_time()": (False, False),
    "```python\nget_time()\n```": (True, True),
}
MARKED_CALL = call_text("get_time", '{"zone": "CET"}')
BLOCK, BAD = '```json\n{"a": ["name"]}\n```', CALL.replace("CET", "EST")
HERMES_TEXTS = {
    "": (True, True),
    f"No {{é}} <tools> ```json [{BAD}": (True, True),
    f"So: {BAD}": (True, True),
    f"```python\n{BAD}": (True, True),
    CALL: (True, True),
    f"\n{CALL}\n{CALL} So.": (True, True),
    f"I look: {MARKED_CALL}\n{MARKED_CALL} So: {BAD}": (True, True),
    f"I look:\n```json\n{CALL}\n```\n<tools>{CALL}</tools>": (True, True),
    f"```json\n{json.dumps(json.loads(CALL), indent=4)}\n```": (True, True),
    f"{BLOCK} Hm: {MARKED_CALL}\n{BLOCK} <tools>\n{CALL}\n</tools>": (True, True),
    '{"zone": 1, "name": "Rome", "a": "\\u00e9"} So.': (True, True),
    '```json\n{"name": "get_timer"}\n```': (True, True),
    f"```json\n{CALL[:-1]}": (True, False),
    '<tools>{"name": "get_time"': (True, False),
    '<tools>{"name": "get_time"}': (False, False),
    '<tools>{"name": "get\\u005ftime"': (False, False),
    '```json\n{"arguments": {}, "name": "get_time"': (False, False),
    '{"a": [```json' + CALL + '], "name": "get_time"': (False, False),
    '{"a": [' + MARKED_CALL + '], "name": "get_time"': (False, False),
    **{
        f"{before}{BAD}": (False, False)
        for before in ("", "\n", f"{CALL}\n", "a <tools>", "a ```json\n", BLOCK + BLOCK[:8])
    },
    f"{BLOCK} <tool_call>\n{BAD}": (False, False),
}
IDS = {"<|channel|>": 300, "<|message|>": 301, "<|constrain|>": 302, "<|start|>": 303, "<|end|>": 304}
OPENING, FINAL = "<|channel|>commentary", "<|channel|>final<|message|>"
TO_TIME, ZONE_JSON = " to=functions.get_time", '{"zone": "CET"}'
PREAMBLE = f"{OPENING}<|message|>I look.<|end|><|start|>assistant"
CHANNEL_TEXTS = {
    f"{FINAL}Hello {{é}}": (True, True),
    f"{PREAMBLE}{FINAL}": (True, True),
    f"{PREAMBLE}{PREAMBLE}{OPENING}{TO_TIME} <|constrain|>json<|message|>{ZONE_JSON}": (True, True),
    **{
        f"{header}{kind}<|message|>{ZONE_JSON}": (True, True)
        for header in (f"{OPENING}{TO_TIME}", f"{TO_TIME}{OPENING}", f"{PREAMBLE}{TO_TIME}{OPENING}")
        for kind in ("", " <|constrain|>json", "<|constrain|>json", " json")
    },
    f"{OPENING}{TO_TIME}<|message|>{ZONE_JSON[:-1]}": (True, False),
    f"{OPENING}<|message|>I look.": (True, False),
    "Hello": (False, False),
    f"{OPENING} to=functions.other": (False, False),
    f"{OPENING}{TO_TIME}<|message|>" + '{"zone": "EST': (False, False),
    f"{OPENING}{TO_TIME}<|message|>{ZONE_JSON}<|end|>": (False, False),
    f"{FINAL}to=functions.": (False, False),  # where calls are read from
    "<|channel|>analysis": (False, False),  # the grammar of reasoning has it
}
UNMARKED = [
    (HERMES, {}, HERMES_TEXTS),
    (LLAMA3_JSON, {}, JSON_TEXTS),
    (PYTHONIC, {}, PYTHON_TEXTS),
    (HARMONY, IDS, CHANNEL_TEXTS),
]


def with_markers(text: str) -> list[int]:
    """Token ids of a text in which markers are tokens."""
    pieces = re.split("(<[|][a-z]+[|]>)", text)
    return [token for piece in pieces for token in ([IDS[piece]] if piece in IDS else piece.encode())]


def text_of(token_ids: Sequence[int]) -> str:
    markers = {token: marker.encode() for marker, token in IDS.items()}
    return b"".join(markers.get(token) or bytes([token]) for token in token_ids if token != EOS).decode()


def calls_in(written: ToolFormat, text: str) -> list[tuple[str, str]]:
    if written is HARMONY:
        channels = ChannelParser(has_tools=True)
        text = channels.push(text)[1] + channels.finish()[1]
    return added_up(ToolCallParser(written, SCHEMAS).push(text)[1])


@pytest.mark.parametrize(
    ("written", "special", "text", "told"),
    [(written, special, *each) for written, special, texts in UNMARKED for each in texts.items()],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_without_a_marker_follow_their_schemas(
    written: ToolFormat, special: dict[str, int], text: str, told: tuple[bool, bool]
) -> None:
    followed = text_and_calls_grammar(written, SCHEMAS, True, special)
    assert may_end(followed, with_markers(text)) == told
    if told[1]:
        assert all(follows(CallDelta(*call)) for call in calls_in(written, text))


@pytest.mark.parametrize("written", [HERMES, LLAMA3_JSON, PYTHONIC], ids=["hermes", "llama3_json", "pythonic"])
def test_one_of_many_functions_is_bound(written: ToolFormat) -> None:
    names = ["_".join(words) for words in permutations(("list", "create", "issue", "event", "user"), 4)]
    followed = text_and_calls_grammar(written, dict.fromkeys(names, ZONE), True, {})
    for name in (names[0], names[-1]):
        call = CALLED if written is PYTHONIC else CALL
        assert may_end(followed, [*call.replace("get_time", name).encode()]) == (True, True)
        assert may_end(followed, [*call.replace("get_time", name).replace("CET", "EST").encode()]) == (False, False)


@pytest.mark.parametrize(
    ("written", "one", "two"),
    [(LLAMA3_JSON, CALL, f"{CALL}; {CALL}"), (PYTHONIC, CALLED, f"{CALLED[:-1]}, {CALLED[1:]}")],
)
def test_without_parallel_calls_an_answer_is_one(written: ToolFormat, one: str, two: str) -> None:
    assert allows(text_and_calls_grammar(written, SCHEMAS, True, {}), two)
    followed = text_and_calls_grammar(written, SCHEMAS, False, {})
    assert allows(followed, one)
    assert not allows(followed, two)


@pytest.mark.parametrize(
    ("written", "special", "call"),
    [
        (LLAMA3_JSON, {"<|python_tag|>": 300}, CALL),
        (PYTHONIC, {"<|python_start|>": 300, "<|python_end|>": 301}, CALLED),
    ],
)
def test_calls_may_have_their_tokens_around_them(written: ToolFormat, special: dict[str, int], call: str) -> None:
    followed = text_and_calls_grammar(written, SCHEMAS, True, special)
    assert may_end(followed, [300, *call.encode()]) == (True, True)
    assert may_end(followed, [*call.encode()]) == (True, True)
    assert may_end(followed, [*call.encode(), 301]) == ((written is PYTHONIC,) * 2)
    assert may_end(followed, [300, *b"Hello"]) == (False, False)
    assert may_end(followed, [*b"Hello", 300]) == (False, False)


def test_messages_come_after_an_analysis() -> None:
    before = lark_before_answer(CHANNELS, False, IDS, has_header=True)
    followed = grammar.after(before, text_and_calls_grammar(HARMONY, SCHEMAS, True, IDS))
    analysis = "<|channel|>analysis<|message|>to=functions. Hm.<|end|><|start|>assistant"
    for text, told in CHANNEL_TEXTS.items():
        if "analysis" not in text:
            assert may_end(followed, with_markers(analysis + text)) == told
            assert may_end(followed, with_markers(text)) == told


def test_messages_that_no_special_tokens_tell_apart_bind_nothing() -> None:
    with pytest.raises(InvalidRequestError, match="not told apart by special tokens"):
        text_and_calls_grammar(HARMONY, SCHEMAS, True, {})


@pytest.mark.parametrize(
    ("written", "special", "begin"),
    [
        (HERMES, {}, 'I look:\n```json\n{"name": "get_weather"'),
        (HERMES, {}, '{"name": "get_weather"'),
        (LLAMA3_JSON, {}, '{"name": "get_weather"'),
        (PYTHONIC, {}, "[get_weather("),
        (PYTHONIC, {}, "So:\n```tool_code\nprint(get_weather("),
        (HARMONY, IDS, f"{PREAMBLE}{OPENING} to=functions.get_weather"),
        (HARMONY, IDS, " to=functions.get_weather"),
    ],
    ids=["hermes, in a block", "hermes", "llama3_json", "pythonic", "tool_code", "openai", "openai, recipient first"],
)
def test_a_random_model_that_has_begun_a_call_ends_it(
    written: ToolFormat, special: dict[str, int], begin: str
) -> None:
    is_parallel = written is not HERMES and "```" not in begin  # after its calls any text may follow
    followed = text_and_calls_grammar(written, SCHEMAS, is_parallel, special)
    outputs = [written_by(followed, seed, with_markers(begin)) for seed in range(6)]
    for output in outputs:
        calls = calls_in(written, text_of(output))
        assert calls
        assert all(follows(CallDelta(*call)) for call in calls)
    assert len(set(map(tuple, outputs))) > 1
