"""Masks, biases and penalties for some rows of a step's logits on a GPU, each row by its own rules.

One program computes a chunk of one row, in float32: minus infinity for blocked tokens, biases, then penalties, as in
`engine/logit_rules/logits.py`. The rules of a row are columns on the device, written when a request gets the row.

Reference: `engine.logit_rules.logits.apply_params`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
IN_PROMPT = 1 << 14  # flag of a count: the token is in the prompt
MAX_COUNT = IN_PROMPT - 1
_COUNT_BITS = tl.constexpr(MAX_COUNT)


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """Rules of `max_rows` rows.

    blocked: int32 (max_rows, ceil(vocab / 32)), bit i of word w: token 32 w + i is not allowed.
    bias_ids int32, biases float32: (max_rows, max_biases); each row has num_biases of them, int32 (max_rows,).
    counts: int16 (max_rows, vocab), occurrences in the output up to MAX_COUNT, plus IN_PROMPT.
    penalties: float32 (max_rows, 3), repetition (1: off), frequency and presence (0: off).
    """

    blocked: Tensor
    bias_ids: Tensor
    biases: Tensor
    num_biases: Tensor
    counts: Tensor
    penalties: Tensor

    @classmethod
    def empty(cls, max_rows: int, vocab_size: int, max_biases: int, device: torch.device) -> LogitsRules:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, *shape, dtype=dtype, device=device)

        return cls(
            zeros(triton.cdiv(vocab_size, 32), dtype=torch.int32),
            zeros(max_biases, dtype=torch.int32),
            zeros(max_biases, dtype=torch.float32),
            zeros(dtype=torch.int32),
            zeros(vocab_size, dtype=torch.int16),
            torch.tensor([1.0, 0.0, 0.0], device=device).repeat(max_rows, 1),
        )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _process_kernel(
    logits_ptr, out_ptr, sources_ptr, rows_ptr, blocked_ptr, bias_ids_ptr, biases_ptr, num_biases_ptr, counts_ptr,
    penalties_ptr, vocab_size, logits_stride, num_words, max_biases, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    source = tl.load(sources_ptr + index)
    row = tl.load(rows_ptr + index)
    values = tl.load(logits_ptr + source * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
    if row >= 0:
        words = tl.load(blocked_ptr + row * num_words + ids // 32, mask=inside, other=0)
        values = tl.where(((words >> (ids % 32)) & 1) != 0, float("-inf"), values)
        for k in range(tl.load(num_biases_ptr + row)):
            biased = tl.load(bias_ids_ptr + row * max_biases + k)
            values += tl.where(ids == biased, tl.load(biases_ptr + row * max_biases + k), 0.0)
        repetition = tl.load(penalties_ptr + row * 3)
        frequency = tl.load(penalties_ptr + row * 3 + 1)
        presence = tl.load(penalties_ptr + row * 3 + 2)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            seen = tl.load(counts_ptr + row * vocab_size + ids, mask=inside, other=0).to(tl.int32)
            count = seen & _COUNT_BITS
            repeated = tl.where(values > 0, values / repetition, values * repetition)
            values = tl.where(seen != 0, repeated, values)
            values -= tl.where(count > 0, count.to(tl.float32) * frequency + presence, 0.0)
    tl.store(out_ptr + index * vocab_size + ids, values, mask=inside)


def process_logits(logits: Tensor, sources: Tensor, rows: Tensor, rules: LogitsRules, out: Tensor) -> None:
    """Write row `sources[i]` of the logits, changed by the rules of row `rows[i]`, to row i of `out`.

    logits: (any, vocab), tokens of stride 1. sources, rows: int64 (n,); a row of -1 has no rules. out: float32 (n or
    more, vocab), contiguous.
    """
    vocab_size = logits.shape[1]
    if out.shape[1] != vocab_size or not out.is_contiguous():
        raise ValueError(f"logits of {vocab_size} tokens do not fit into {list(out.shape)}")
    _process_kernel[(triton.cdiv(vocab_size, CHUNK), sources.shape[0])](
        logits, out, sources, rows, rules.blocked, rules.bias_ids, rules.biases, rules.num_biases, rules.counts,
        rules.penalties, vocab_size, logits.stride(0), rules.blocked.shape[1], rules.bias_ids.shape[1], CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip
