"""Plans of made-up requests, to warm a runner up and to measure how much memory its largest steps take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.plan import NewRequest, ScheduledRow, StepPlan
from engine.request import RequestId, SamplingParams
from kvstore.types import BlockId

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
WITH_RULES = SamplingParams(max_tokens=1, temperature=0.0, seed=0, logit_bias=((0, 1.0),))


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


def prompt_plan(num_tokens: int, block_size: int, num_groups: int = 1) -> StepPlan:
    """A single prompt."""
    return trial_plan([(0, num_tokens)], block_size, num_groups=num_groups)


def warmup_plans(num_tokens: int, block_size: int, num_groups: int = 1) -> Iterator[StepPlan]:
    """Yield steps whose kernels no captured graph launches.

    The first is a prompt of `num_tokens`. The second has a block of cached context and rules for its logits; it is
    left out where a prompt is no longer than a block.
    """
    yield prompt_plan(num_tokens, block_size, num_groups)
    if num_tokens > block_size:
        chunk = block_size, num_tokens - block_size
        yield trial_plan([chunk], block_size, WITH_RULES, num_groups=num_groups)
