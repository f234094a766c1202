"""Plans with artificial requests, to warm up a runner and to measure the memory of its largest steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.wings import has_wing
from engine.plan import NewRequest, ScheduledRow, StepPlan
from engine.request import RequestId, SamplingParams
from kvstore.types import BlockId

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
WITH_RULES = SamplingParams(max_tokens=1, temperature=0.0, seed=0, logit_bias=((0, 1.0),))
WITH_ALL = SamplingParams(  # all that can be applied to a row's logits
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
    """Return one sampling row per (start, num_tokens): sequences of zeros in the pool's first `num_blocks` blocks.

    num_groups: number of the model's KV groups.
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
    """Yield steps that, with those that graphs are captured of, launch every kernel variant that serving needs.

    Variants depend on the step's number of tokens, rounded up to a power of two, on whether a row is alone and has
    cached context, and on what is applied to its logits. num_captured: number of tokens up to which graphs are
    captured. max_tokens: of a step. sampled: row counts with different variants in the layers that compute only
    sampled rows, ascending; the last one is the maximum of a step. max_length: of a sequence.
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
    """List the powers of two above a size and below `most`, and `most`."""
    powers = [1 << exponent for exponent in range(above.bit_length(), most.bit_length())]
    return sorted({*powers, most}) if most > above else []
