"""What grammars allow on the tiny tokenizer, whose first tokens are bytes, and calls that follow their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from common.tools.tool_parser import CallDelta
from engine.grammar.grammars import Grammars

DRY_RUN = load_tokenizer(resolve_model("dry-run"))
EOS = DRY_RUN.eos_token_ids[0]
GRAMMARS = Grammars(lambda: DRY_RUN, DRY_RUN.vocab_size)
BLANKS = list(b" \t\r\n")
CITY: dict[str, Any] = {
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
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "get_time": ZONE}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def in_mask(words: Any) -> list[int]:
    """Return the tokens that a mask allows."""
    return [int(token_id) for token_id in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]


def allowed(followed: str, token_ids: list[int]) -> list[int]:
    """Return the tokens that may come next."""
    words = GRAMMARS.start(followed).result().allowed(token_ids)
    assert words is not None
    return in_mask(words)


def may_end(followed: str, begun: str | Sequence[int]) -> tuple[bool, bool]:
    """Whether an answer may begin with `begun`, and whether it may end there."""
    words = GRAMMARS.start(followed).result().allowed(list(begun.encode() if isinstance(begun, str) else begun))
    return words is not None, words is not None and EOS in in_mask(words)


def allows(followed: str, text: str) -> bool:
    """Whether the whole text follows the grammar. Text that spells a special token is encoded as one."""
    return may_end(followed, DRY_RUN.encode(text, allow_special=True))[1]


def written_by(followed: str, seed: int, begin: str | list[int] = "") -> list[int]:
    """Return what a random model writes after `begin`, without blanks where it has a choice."""
    draw = random.Random(seed)
    matcher = GRAMMARS.start(followed).result()
    output = list(begin.encode() if isinstance(begin, str) else begin)
    while True:
        words = matcher.allowed(output)
        assert words is not None
        tokens = in_mask(words)
        token_id = draw.choice([token for token in tokens if token not in BLANKS] or tokens)
        is_text = len(tokens) > 128 and EOS in tokens
        if token_id == EOS or (is_text and draw.random() < 0.1):
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
