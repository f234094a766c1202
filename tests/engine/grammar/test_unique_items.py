"""Items differ wherever in an answer the JSON stands; masks leave out every token that repeats one, and no other."""

from __future__ import annotations

import gc
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequestError
from common.grammar import grammar
from common.grammar.grammar import check_grammar
from common.grammar.unique_items import State
from common.grammar.unique_places import unique_places
from common.reasoning.reasoning_format import FORMATS as REASONING_FORMATS
from common.reasoning.reasoning_format import HARMONY as CHANNELS
from common.reasoning.reasoning_format import THINK, ReasoningFormat, lark_before_answer, marks
from common.tools.json_calls import HERMES, LLAMA3_JSON, MISTRAL_LIST
from common.tools.named_calls import DEEPSEEK_V3, DEEPSEEK_V31, HARMONY, KIMI_K2, MISTRAL_NAMED
from common.tools.tagged_calls import QWEN3_CODER
from common.tools.tool_format import calls_grammar, text_and_calls_grammar
from common.tools.tool_parser import ToolFormat
from engine.grammar.grammars import Grammars
from engine.grammar.unique_tokens import TokenTable, UniqueTokens
from tests.common.default_model import default_tokenizer
from tests.engine.grammar.matching import in_mask, may_end, written_by

FEW: dict[str, Any] = {"enum": ["a", "b", "ab"]}
ALL_OF_THEM = {"type": "array", "items": FEW, "uniqueItems": True, "minItems": 3}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
DIGITS = {"type": "array", "items": DIGIT, "uniqueItems": True, "minItems": 5, "maxItems": 8}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"texts": {"$ref": "#/$defs/Texts"}, "digits": DIGITS},
    "required": ["texts", "digits"],
    "additionalProperties": False,
    "$defs": {"Texts": ALL_OF_THEM},
}
ARRAY = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SPELLED = 'to=functions.ab <|constrain|>json<|message|>{"name": "ab", "arguments": {"texts": ["a", "a"'
MISTRAL = REASONING_FORMATS["mistral"]


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Turn garbage collection off: a mask's time is bounded, and collecting the garbage of many tests would count."""
    gc.disable()
    yield
    gc.enable()


def is_unique(value: Any) -> bool:
    return sorted(value["texts"]) == ["a", "ab", "b"] and len(set(value["digits"])) == len(value["digits"]) >= 5


def after(written: ReasoningFormat, is_open: bool, answer: str, has_header: bool = False) -> str:
    before = lark_before_answer(written, is_open, {}, None, has_header)
    return grammar.after(before, answer, marks(written, is_open, has_header))


@pytest.mark.parametrize("answer", [grammar.json_schema(ARRAY), grammar.compact_json(ARRAY)], ids=["json", "compact"])
@pytest.mark.parametrize(
    ("written", "is_open", "reasoning"),
    [
        (THINK, False, '<think>["a","a"]</think>\n'),
        (THINK, False, ""),
        (THINK, True, '["a","a"]</think>'),
        (MISTRAL, False, '[THINK]["a","a"[/THINK'),
        (MISTRAL, False, ""),
        (CHANNELS, False, '<|channel|>analysis<|message|>["a","a"<|end|><|start|>assistant'),
        (CHANNELS, False, ""),
    ],
)
def test_after_reasoning(written: ReasoningFormat, is_open: bool, reasoning: str, answer: str) -> None:
    followed = after(written, is_open, answer)
    check_grammar(followed)
    if written is MISTRAL and reasoning:
        reasoning += "]"
    begin = reasoning + ("<|channel|>final<|message|>" if written is CHANNELS else "")
    assert may_end(followed, f'{begin}["a","aa"]') == (True, True)
    assert may_end(followed, f'{begin}["a","a') == (True, False)
    assert may_end(followed, f'{begin}["a","a"') == (False, False)


@pytest.mark.parametrize("may_reason", [False, True])
@pytest.mark.parametrize(
    "written", [HERMES, LLAMA3_JSON, MISTRAL_LIST, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, MISTRAL_NAMED, HARMONY]
)
def test_in_calls_of_tools(written: ToolFormat, may_reason: bool) -> None:
    # A function's name may be the end of another's, and its schema allow what the other forbids.
    schemas = {"ab": SCHEMA, "b": {**SCHEMA, "properties": {**SCHEMA["properties"], "texts": {"type": "array"}}}}
    followed, begin = calls_grammar(written, schemas, True, {}), ""
    if may_reason:
        followed = after(CHANNELS if written is HARMONY else THINK, False, followed, has_header=True)
        begin = f"<think>Hm. {SPELLED}</think>"
        if written is HARMONY:
            begin = f"<|channel|>analysis<|message|>{SPELLED}<|end|><|start|>assistant"
    check_grammar(followed)
    num_read = 0
    for seed in range(6):
        text = bytes(written_by(followed, seed, begin)).decode().removeprefix(begin)
        for at in (at for at in range(len(text)) if text.startswith('{"texts"', at)):
            value, _ = json.JSONDecoder().raw_decode(text[at:])
            is_first = "ab" in text[:at].rpartition("}")[2]
            assert len(set(value["digits"])) == len(value["digits"]) >= 5
            assert not is_first or is_unique(value), text
            num_read += is_first
    assert num_read


def test_special_tokens_are_no_text_that_spells_them() -> None:
    model = default_tokenizer()
    special = sorted(model.special_id_of)
    begin, end = "<jupyter_start>", "<jupyter_output>"
    assert {begin, end} <= set(special)
    thinking = ReasoningFormat(begin, end)
    ids_of = {text: model.special_id_of[text] for text in (begin, end)}
    before = lark_before_answer(thinking, False, ids_of)
    followed = grammar.after(before, grammar.json_schema(ARRAY), marks(thinking, False, False))
    reasoning = [ids_of[begin], *model.encode(f'Hm. {end}["a","a"]'), ids_of[end]]
    matcher = Grammars(lambda: model, model.vocab_size).start(followed).result()
    assert matcher.allowed([*reasoning, *model.encode('["a","b"')]) is not None
    assert matcher.allowed([*reasoning, *model.encode('["a","a"')]) is None


def test_masks_while_a_model_reasons_are_left_as_they_are() -> None:
    places = unique_places(after(THINK, False, grammar.json_schema(ARRAY)))
    assert places is not None
    follower = UniqueTokens(places, TokenTable([b"<think>", b"a", b"</thi", b"nk>", b"["]))
    apart = []
    for count in range(6):
        follower.follow(0, [0, 1, 2, 3, 4][:count])
        state = follower._states[-1]
        assert state is not None
        apart.append(places.is_apart(state))
    assert apart == [False, True, True, False, False, False]
    state = follower._states[2]
    assert state is not None
    assert len(state.tail) < len("</think>")  # a long reasoning takes no memory


@pytest.mark.parametrize(
    "followed",
    [
        lambda: calls_grammar(QWEN3_CODER, {"f": SCHEMA | {"properties": {"a": ARRAY}}}, True, {}),
        lambda: text_and_calls_grammar(HERMES, {"f": SCHEMA | {"properties": {"a": ARRAY}}}, True, {}),
        lambda: calls_grammar(HERMES, {"f": {"type": "object"}}, True, {}, {**SCHEMA, "properties": {"a": ARRAY}}),
        lambda: grammar.json_schema({"type": "array", "items": ARRAY, "uniqueItems": True}),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused_in_words(followed: Any) -> None:
    with pytest.raises(InvalidRequestError, match="uniqueItems is followed for strings"):
        check_grammar(followed())


# -- masks -----------------------------------------------------------------------------------------------------------


PARTS = [b'"', b",", b"a", b"1", b" ", b"]", b"[", b"\\", b"b\\"]
LONG = [*itertools.product(PARTS, repeat=4)]
TOKENS = [b"".join(parts) for count in (1, 2, 3) for parts in itertools.product(PARTS, repeat=count)]
TOKENS += [b"".join(parts) for parts in random.Random(0).sample(LONG, len(LONG) // 5)]
TABLE = TokenTable(TOKENS)
NUM_WORDS = -(-len(TOKENS) // 32)
SCHEMAS = [
    {"type": "string"},
    {"type": "integer"},
    {"type": ["string", "integer"]},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^a1?$"},
    {"enum": ["a", "aa", 1, 11]},
]


@pytest.mark.parametrize("items", SCHEMAS, ids=range(len(SCHEMAS)))
@pytest.mark.parametrize(
    "begun", ["[", '["a"', '["a", ', '["a", "', '["a","a', '["a", "\\', "[1, ", "[1, 1", '{"k": [1, 1']
)
def test_masks_are_those_of_trying_every_token(items: dict[str, Any], begun: str) -> None:
    schema = {"type": ["array", "object"], "items": items, "uniqueItems": True}
    found = unique_places(grammar.json_schema({**schema, "additionalProperties": {"type": "array"}}))
    assert found is not None
    state: State | None = found.after(State(), begun.encode())
    follower = UniqueTokens(found, TABLE)
    follower._states.append(state)
    if state is None:  # nothing follows
        return
    every = np.packbits(np.arange(32 * NUM_WORDS) < len(TOKENS), bitorder="little").view(np.uint32)
    mask = follower.without_repeats(every)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(TOKENS)]
    for token_id, token in enumerate(TOKENS):
        if _is_json_so_far(begun.encode() + token):
            assert bool(allowed[token_id]) is (found.after(state, token) is not None), token


def test_tokens_that_are_taken_back() -> None:
    found = unique_places(grammar.json_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
    assert found is not None
    follower = UniqueTokens(found, TABLE)
    ids = [TOKENS.index(token) for token in (b"[", b"1,", b"1", b",")]
    assert follower.follow(0, ids[:3])
    assert not follower.follow(3, ids)
    assert follower.follow(2, [*ids[:2], TOKENS.index(b"11"), ids[3]])


@pytest.mark.parametrize("items", [{"type": "integer"}, {"type": "string"}, {"type": "string", "format": "date"}])
def test_answers_of_a_models_tokens(items: dict[str, Any]) -> None:
    model = default_tokenizer()
    grammars = Grammars(lambda: model, model.vocab_size)
    text = grammar.json_schema({"type": "array", "items": items, "uniqueItems": True, "minItems": 4, "maxItems": 6})
    likely = [
        model.encode(each)[0]
        for each in ['"', ",", "]", "1", "12", "a", '","', '",', '",', "1,", "2024", "-01", "-02"]
    ]
    for seed in range(5):
        rng = random.Random(seed)
        matcher, output = grammars.start(text).result(), list[int]()
        while True:
            words = matcher.allowed(output)
            assert words is not None
            allowed = in_mask(words)
            if model.eos_token_ids[0] in allowed:
                break
            wanted = [each for each in likely if each in allowed]
            output.append(rng.choice(wanted) if wanted and rng.random() < 0.9 else rng.choice(allowed))
        value = json.loads(model.decode(output))
        assert len(set(value)) == len(value) >= 4


@cache
def _is_json_so_far(text: bytes) -> bool:
    """Whether the text can be the beginning of an array of strings and numbers, or of an object of these."""
    body = text.removeprefix(b'{"k": ').decode()
    for end in ("", "]", "1]", '"]', '""]'):
        with suppress(json.JSONDecodeError):
            items = json.loads(body + end)
            return all(isinstance(item, str | int) for item in items) and bool(end or body[-1] == "]")
    return False
