"""Plans of made-up requests, to warm a runner up and to measure how much memory its largest steps take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.wings import has_wing
from engine.plan import NewRequest, ScheduledRow, StepPlan
from engine.request import RequestId, SamplingParams
from kvstore.types import BlockId

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
WITH_RULES = SamplingParams(max_tokens=1, temperature=0.0, seed=0, logit_bias=((0, 1.0),))
WITH_ALL = SamplingParams(  # what the logits of a row can be asked for
    max_tokens=1, temperature=0.8, top_p=0.9, top_k=8, min_p=0.1, presence_penalty=0.1, repetition_penalty=1.1,
    seed=0, logit_bias=((0, 1.0),), bad_words=((0, 0),), logprobs=1,
    prompt_logprobs=1 if has_wing("engine.logprobs") else None,
)  # fmt: skip


def trial_plan(
    shares: Sequence[tuple[int, int]],
    block_size: int,
    params: SamplingParams = GREEDY,
    num_blocks: int = 1 << 30,
    num_groups: int = 1,
) -> StepPlan:
    """One sampling row per (start, num_tokens), of sequences of zeros over the pool's first `num_blocks` blocks.

    num_groups: KV groups of the model.
    """
    plan = StepPlan()
    for index, (start, num_tokens) in enumerate(shares):
        length = start + num_tokens
        request_id = RequestId(f"trial-{index}")
        block_ids = tuple(BlockId(i % num_blocks) for i in range(-(-length // block_size) * num_groups))
        plan.new.append(NewRequest(request_id, [0] * length, length, params))
        plan.rows.append(ScheduledRow(request_id, start, num_tokens, True, block_ids))
    return plan


def warmup_plans(
    num_captured: int, max_tokens: int, sampled: Sequence[int], max_length: int, block_size: int, num_groups: int = 1
) -> Iterator[StepPlan]:  # fmt: skip
    """Yield steps that, with those that graphs are captured of, launch every variant of a kernel that is served with.

    Variants depend on the power of two that holds a step's tokens, on whether a row is alone and has cached context,
    and on what is asked of its logits. num_captured: tokens up to which graphs are captured. max_tokens: of a step.
    sampled: numbers of rows that differ to the layers that compute sampled rows alone, ascending, the last one as
    many as a step has at most. max_length: of a sequence.
    """
    num_tokens = min(max_tokens, max_length) - 1
    yield trial_plan([(0, num_tokens)], block_size, num_groups=num_groups)
    for size in _sizes(num_captured, max_tokens):
        num_full, rest = divmod(size, max_length)
        rows = [(0, max_length)] * num_full + [(0, rest)] * (rest > 0)
        yield trial_plan(rows[: sampled[-1]], block_size, num_groups=num_groups)
    for num_rows in sampled:
        length = min(num_captured, max_tokens - num_rows + 1, max_length)
        yield trial_plan([(0, 1)] * (num_rows - 1) + [(0, length)], block_size, num_groups=num_groups)
    if num_tokens > block_size:
        yield trial_plan([(block_size, num_tokens - block_size)], block_size, WITH_RULES, num_groups=num_groups)
        yield trial_plan([(block_size, 1 + block_size // 2)], block_size, WITH_ALL, num_groups=num_groups)


def _sizes(above: int, most: int) -> list[int]:
    """Powers of two above a size, up to the largest one, and that."""
    powers = [1 << exponent for exponent in range(above.bit_length(), most.bit_length())]
    return sorted({*powers, most}) if most > above else []
