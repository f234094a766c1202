"""Engines over a runner that remembers what was written where, and the invariants that all of them keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from engine.engine import Engine
from engine.kv.manager import KVManager
from engine.request import Request, RequestId, RequestStatus, SamplingParams
from engine.scheduling.order import ServiceOrder
from engine.scheduling.scheduler import Scheduler
from kvstore.pool.block_pool import BlockPool
from tests.engine.fakes import VOCAB_SIZE, BlockMemoryRunner, expected_tokens

if TYPE_CHECKING:
    from engine.kv_groups.block_groups import BlockGroups
    from engine.objectives.prompt_budget import PromptBudget
    from engine.speculation.drafts import Speculation

BLOCK = 4
# Small enough that requests preempt each other, whatever is drawn.
SMALL_ENGINES = {
    "num_blocks": st.integers(6, 20),
    "host_slots": st.integers(0, 16),
    "swap": st.booleans(),
    "budget": st.integers(4, 24),
    "prefix_cache": st.booleans(),
}


def groups_of(windows: tuple[int, ...], budget: int) -> BlockGroups:
    """Make KV groups, see `make_engine`. budget: tokens of a step."""
    if not windows:
        from engine.kv_groups.block_groups import BlockGroups

        return BlockGroups(BLOCK)
    from engine.windows.block_groups import WindowedGroups

    return WindowedGroups(BLOCK, windows, budget)


def with_host_tier(num_slots: int, pool: BlockPool, groups: BlockGroups, by_swap: bool) -> KVManager:
    """Make a KV manager whose tier has no buffer: the fake runner keeps host slots itself."""
    from engine.host_tier.kv_manager import TieredKVManager
    from kvstore.tier.host_tier import HostTierAllocator

    tier: Any = HostTierAllocator(num_slots)
    return TieredKVManager(pool, groups, "test", tier, by_swap)


def grouped(pool: BlockPool, groups: BlockGroups) -> KVManager:
    """Make the KV manager of a model with windows."""
    from engine.kv_groups.manager import GroupedKVManager

    return GroupedKVManager(pool, groups, "test")


def make_engine(
    num_blocks: int = 32,
    *,
    host_slots: int = 0,
    max_num_seqs: int = 8,
    budget: int = 16,
    swap: bool = False,
    prefix_cache: bool = True,
    eos: frozenset[int] = frozenset(),
    overlap: bool = False,
    order: ServiceOrder | None = None,
    speculation: Speculation | None = None,
    prompt_budget: PromptBudget | None = None,
    num_stages: int = 1,
    windows: tuple[int, ...] = (),
    max_model_len: int = 4096,
    is_late: bool = False,
) -> tuple[Engine, BlockMemoryRunner]:
    """windows: of KV groups, 0: none; empty for a model without windows. is_late: see BlockMemoryRunner."""
    pool = BlockPool(num_blocks, prefix_cache)
    if host_slots:
        kv = with_host_tier(host_slots, pool, groups_of(windows, budget), swap)
    elif windows:
        kv = grouped(pool, groups_of(windows, budget))
    else:
        kv = KVManager(pool, BLOCK, "test")
    scheduler = Scheduler(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        order=order,
        speculation=speculation,
        prompt_budget=prompt_budget,
        num_stages=num_stages,
    )
    runner = BlockMemoryRunner(BLOCK, 2 if overlap else num_stages, windows or (0,), is_late)
    runner.is_pipeline = num_stages > 1
    return Engine(scheduler, runner, vocab_size=VOCAB_SIZE, eos_token_ids=eos), runner


def run_all(engine: Engine, max_steps: int = 3000) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for output in engine.step().outputs:
            assert output.error is None
            tokens.setdefault(output.request.request_id, []).extend(output.new_token_ids)
        engine.kv.pool.check_integrity()
    assert not engine.has_work(), "requests are stuck"
    return tokens


def run_swapped(engine: Engine) -> None:
    """Run four prompts of 5 tokens to 20 tokens each, for which blocks do not suffice at once."""
    requests = [engine.add_request([i + 1] * 5, SamplingParams(max_tokens=20)) for i in range(4)]
    statuses = set()
    while engine.has_work():
        engine.step()
        statuses |= {request.status for request in requests}
    assert RequestStatus.SWAPPED in statuses
    for i, request in enumerate(requests):
        assert request.output_token_ids == expected_tokens([i + 1] * 5, 20)
    assert_quiet(engine)


def assert_quiet(engine: Engine) -> None:
    """Check that no request owns blocks or slots any more."""
    kv = engine.kv
    kv.pool.check_integrity()
    assert kv.pool.num_used == 0
    assert engine.load().num_requests == 0
    if (tier := getattr(kv, "host_tier", None)) is not None:
        tier.check_integrity()
        assert tier.num_pinned == 0


def load_request(engine: Engine, runner: BlockMemoryRunner, prompt: list[int], ok: bool) -> Request:
    """Admit a request whose KV a peer has, and finish its load."""
    first = expected_tokens(prompt, 1)
    request = engine.add_request(
        prompt,
        SamplingParams(max_tokens=5),
        output_token_ids=first,
        kv_source="peer",
        num_source_tokens=len(prompt),
    )
    outcome = engine.step()
    assert outcome.outputs == []
    [job] = outcome.loads
    assert (job.source, request.status) == ("peer", RequestStatus.LOADING)
    for position, block_id in zip(job.positions, job.block_ids, strict=True):
        cells = prompt[position * BLOCK : (position + 1) * BLOCK]
        runner.blocks[block_id] = [*cells, *([None] * (BLOCK - len(cells)))] if ok else [None] * BLOCK
    engine.finish_load(job, ok)
    return request


def check_any_order(
    engine: Engine, data: st.DataObject, budget: int, add: Callable[[], tuple[Request, list[int]]]
) -> None:
    """Requests, aborts and steps of at most four rows in any order. add: adds one, returns its answer."""
    live: dict[RequestId, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "abort"]))
        if action == "add":
            request, expected = add()
            live[request.request_id] = expected
        elif action == "abort" and live:
            name = data.draw(st.sampled_from(sorted(live)))
            engine.abort(name)
            del live[name]
        else:
            outcome = engine.step()
            assert len(outcome.plan.rows) <= 4
            assert sum(row.num_tokens for row in outcome.plan.rows) <= budget
            for output in outcome.outputs:
                tokens.setdefault(output.request.request_id, []).extend(output.new_token_ids)
        engine.kv.pool.check_integrity()
    for request_id, new in run_all(engine).items():
        tokens.setdefault(request_id, []).extend(new)
    for name, expected in live.items():
        assert tokens[name] == expected
    assert engine.num_failed_steps == 0
    assert_quiet(engine)
