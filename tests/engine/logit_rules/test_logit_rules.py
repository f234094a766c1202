"""Effects of a request's masks, biases and penalties on its samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.cpu.test_sampler import (
    EOS,
    VOCAB_SIZE,
    assert_distributed,
    draw_many,
    hooked,
    logits_row,
    row_of,
    sample,
)


@pytest.mark.parametrize("output", [[], [4, 4, 9]])
def test_penalties_follow_their_formulas(output: list[int]) -> None:
    logits = logits_row(2)
    seen: list[Tensor] = []
    row = row_of(
        prompt=[1, 2, 4],
        output=output,
        temperature=0.0,
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        repetition_penalty=1.5,
    )
    sample([hooked(row, lambda _request, changed: seen.append(changed.clone()))], logits)
    expected = logits.tolist()
    for token_id in {1, 2, 4, *output}:
        value = expected[token_id]
        expected[token_id] = value / 1.5 if value > 0 else value * 1.5
    for token_id, count in Counter(output).items():
        expected[token_id] -= 0.7 + -0.3 * count
    assert seen[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_logit_bias_and_allowed_ids() -> None:
    logits = logits_row(3)
    worst = int(logits.argmin())
    assert sample([row_of(temperature=0.0, logit_bias=((worst, 100.0),))], logits).token_ids == [worst]
    counts = draw_many(logits, 500, temperature=1.0, allowed_token_ids=(4, 40))
    assert set(counts) == {4, 40}
    expected = torch.zeros(VOCAB_SIZE)
    expected[[4, 40]] = logits[[4, 40]].softmax(-1)
    assert_distributed(counts, expected)


def test_bad_words_stop_their_last_token_only_after_the_first_ones() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[20, 21]] = torch.tensor([10.0, 9.0])
    bad: dict[str, Any] = {"temperature": 0.0, "bad_words": ((5, 20), (30,))}
    assert sample([row_of(output=[5], **bad)], logits).token_ids == [21]
    assert sample([row_of(output=[6], **bad)], logits).token_ids == [20]
    assert sample([row_of(prompt=[5], **bad)], logits).token_ids == [21]
    logits[30] = 20.0
    assert sample([row_of(prompt=[6], **bad)], logits).token_ids == [20]
    longer: dict[str, Any] = {"temperature": 0.0, "bad_words": (tuple([9] * 10 + [20]),)}
    assert sample([row_of(prompt=[9], **longer)], logits).token_ids == [30]


def test_min_tokens_masks_every_way_to_stop() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[EOS, 12, 13]] = torch.tensor([10.0, 9.0, 8.0])
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (12,)}
    assert sample([row_of(output=[0], **params)], logits).token_ids == [13]
    assert sample([row_of(output=[0, 0], **params)], logits).token_ids == [EOS]
    assert sample([row_of(output=[0], ignore_eos=True, **params)], logits).token_ids == [EOS]
