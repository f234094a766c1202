"""Prefetches between scheduler and puller: offers to the engine, and their outcomes in the metrics."""

from __future__ import annotations

import pytest

from engine.scheduled_step import KvLoad
from kvstore.handle.handle import open_handle
from kvstore.types import BlockId, BlockKey
from protos import types_pb2 as pb
from tests.kvstore.handle.test_handle import GOOD, changed
from tests.worker.kv.test_kv_loads import BLOCK_SIZE, FAILED, NUM_BLOCKS, OK, REQUEST_ID, Parts
from worker.progressive_pulls.progressive_loads import ProgressiveLoads

KEYS = [BlockKey(bytes([number]) * 32) for number in range(NUM_BLOCKS)]
PART = changed(GOOD, num_tokens=NUM_BLOCKS * BLOCK_SIZE)


@pytest.fixture
def parts() -> Parts:
    return Parts(ProgressiveLoads)


def test_a_part_of_a_prompt_is_offered_to_the_scheduler(parts: Parts) -> None:
    parts.loads.prefetch(pb.KvOffer(kv_handle=PART, block_keys=KEYS))
    assert parts.told == [("keep", open_handle(PART)), ("add", open_handle(PART), KEYS)]


@pytest.mark.parametrize(("num_missing_keys", "num_missing_tokens"), [(1, 0), (0, 1), (NUM_BLOCKS, 0)])
def test_what_is_no_part_of_full_blocks_is_let_go(
    parts: Parts, num_missing_keys: int, num_missing_tokens: int
) -> None:
    part = changed(PART, num_tokens=PART.num_tokens - num_missing_tokens)
    parts.loads.prefetch(pb.KvOffer(kv_handle=part, block_keys=KEYS[num_missing_keys:]))
    assert parts.verbs == ["keep", "abandon"]


@pytest.mark.parametrize("ok", [True, False])
def test_a_prefetch_ends_at_the_engine_and_in_the_figures(parts: Parts, ok: bool) -> None:
    lease = open_handle(PART)
    job, needless = KvLoad(None, lease, [1], [BlockId(7)], BLOCK_SIZE, KEYS[1:2]), KvLoad(None, lease, [], [], 0)
    parts.loads.start([needless, job], parts.open, now=3.0)
    assert parts.told == [("abandon", lease), ("load", job)]
    parts.results = [(job, OK if ok else FAILED)]
    parts.loads.finish(parts.open, parts.report, now=3.5)
    assert parts.report.pulls == [OK] * ok
    assert isinstance(parts.loads, ProgressiveLoads)
    assert parts.loads.figures() == {
        "mini_infer_kv_prefetches": [ok, 1, not ok],
        "mini_infer_kv_prefetched_tokens": [BLOCK_SIZE * ok],
    }
    assert parts.loads.figures() == {}  # as they were
    assert parts.told[2:] == [("finish", job, ok)]
    parts.request.num_prefetched_tokens = BLOCK_SIZE * ok
    parts.loads.start([KvLoad(parts.request, lease, [], [], 0)], parts.open, now=4.0)
    times = parts.open[REQUEST_ID].take_times(now=5.0)
    assert times is not None
    assert (times.num_prefetched_tokens, times.transport) == ((BLOCK_SIZE, "shm") if ok else (0, ""))
