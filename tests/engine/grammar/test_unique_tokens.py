"""Masks leave out every token that repeats an item, also tokens of several items, and no other."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from common.grammar import grammar
from common.grammar.unique_items import State
from common.grammar.unique_places import unique_places
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.grammar.grammars import Grammars
from engine.grammar.unique_tokens import TokenTable, UniqueTokens

PARTS = [b'"', b",", b"a", b"1", b" ", b"]", b"[", b"\\", b"b\\"]
TOKENS = [b"".join(parts) for count in (1, 2, 3, 4) for parts in itertools.product(PARTS, repeat=count)]
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
    model = load_tokenizer(resolve_model("SmolLM2-135M-Instruct"))
    grammars = Grammars(lambda: model, model.vocab_size)
    text = grammar.json_schema({"type": "array", "items": items, "uniqueItems": True, "minItems": 4, "maxItems": 6})
    likely = [
        model.encode(each)[0]
        for each in ['"', ",", "]", "1", "12", "a", '","', '",', '",', "1,", "2024", "-01", "-02"]
    ]
    for seed in range(8):
        rng = random.Random(seed)
        matcher, output = grammars.start(text).result(), list[int]()
        while True:
            words = matcher.allowed(output)
            assert words is not None
            if words[model.eos_token_ids[0] // 32] >> (model.eos_token_ids[0] % 32) & 1:
                break
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            wanted = [each for each in likely if words[each // 32] >> (each % 32) & 1]
            output.append(rng.choice(wanted) if wanted and rng.random() < 0.9 else int(rng.choice(allowed)))
        value = json.loads(model.decode(output))
        assert len(set(value)) == len(value) >= 4


@cache
def _is_json_so_far(text: bytes) -> bool:
    """Whether a grammar would let the text begin an array of texts and numbers, or an object of such."""
    depth, expects_item, in_text, escaped = 0, True, False, False
    body = text.removeprefix(b'{"k": ')
    if not body.startswith(b"["):
        return False
    previous = b""
    for byte in body:
        one = bytes((byte,))
        if in_text:
            if escaped and one not in b'"\\nrbtf':
                return False
            escaped, in_text = one == b"\\" and not escaped, one != b'"' or escaped
            continue
        if depth == 0 and previous:
            return False
        match one:
            case b"[" if expects_item and previous != b"1":
                depth += 1
            case b"]" if not expects_item or previous == b"[":
                depth, expects_item = depth - 1, False
            case b"," if not expects_item:
                expects_item = True
            case b'"' if expects_item and previous != b"1":
                in_text, expects_item = True, False
            case b"1" if expects_item or previous == b"1":
                expects_item = False
            case b" ":
                pass
            case _:
                return False
        previous = one
    return depth <= 1
