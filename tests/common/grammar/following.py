"""Answers that a grammar allows, with the bytes of dry-run as tokens."""

from __future__ import annotations

import random

import numpy as np

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.grammar.grammars import Grammars

DRY_RUN = load_tokenizer(resolve_model("dry-run"))
GRAMMARS = Grammars(lambda: DRY_RUN, DRY_RUN.vocab_size)
EOS = DRY_RUN.eos_token_ids[0]


def allows(grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    words = GRAMMARS.start(grammar).result().allowed(DRY_RUN.encode(text))
    return words is not None and bool(words[EOS // 32] >> (EOS % 32) & 1)


def random_text(grammar: str, seed: int) -> str:
    """Make a random text that follows the grammar; long ones end soon."""
    rng, matcher = random.Random(seed), GRAMMARS.start(grammar).result()
    output: list[int] = []
    while True:
        words = matcher.allowed(output)
        assert words is not None
        allowed = [int(each) for each in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
        printable = [token for token in allowed if 9 <= token < 127]
        if EOS in allowed and (not printable or len(output) > 60 or rng.random() < 0.5):
            return DRY_RUN.decode(output)
        ends = [token for token in b'"]}' if token in allowed] or [token for token in b"," if token in allowed]
        hurry = 0.8 if len(output) > 200 else 0.3
        output.append(ends[0] if ends and rng.random() < hurry else rng.choice(printable or allowed))
