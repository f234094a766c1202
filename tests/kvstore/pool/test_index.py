"""The prefix index, which knows when it may be inexact, and the log of events that it follows."""

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.index import IndexState, PrefixIndex
from kvstore.types import BlockKey, WorkerId
from protos import types_pb2 as pb
from worker.front.sessions import EventLog

KEYS = block_keys(root_key("model"), pack_ids(range(10)), 1)
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def test_matches_counts_leading_blocks() -> None:
    index = PrefixIndex()
    index.snapshot(A, 0, KEYS[:5])
    index.snapshot(B, 0, KEYS[:2] + KEYS[3:])
    index.snapshot(C, 0, KEYS[1:])
    assert index.matches(KEYS) == {A: 5, B: 2}
    assert index.matches(KEYS[:2]) == {A: 2, B: 2}
    assert index.matches(KEYS[1:3]) == {A: 2, B: 1, C: 2}
    assert index.matches([]) == {}
    assert index.num_keys == 10


def test_consecutive_events_keep_it_exact() -> None:
    index = PrefixIndex()
    assert index.state(A) is IndexState.DEGRADED
    assert index.apply(A, 1, stored=KEYS[:3])
    assert index.apply(A, 2, removed=KEYS[2:3])
    assert index.state(A) is IndexState.EXACT
    assert index.apply(A, 2, removed=KEYS[:1])  # seen before
    assert index.matches(KEYS) == {A: 2}


def test_a_gap_degrades_until_a_snapshot() -> None:
    index = PrefixIndex()
    index.snapshot(A, 4, KEYS[:1])
    assert not index.apply(A, 6, stored=KEYS[1:2])
    assert index.state(A) is IndexState.DEGRADED
    assert not index.apply(A, 7, stored=KEYS[2:3])
    assert index.matches(KEYS) == {A: 3}
    index.snapshot(A, 7, KEYS[:4])
    assert index.state(A) is IndexState.EXACT
    assert index.apply(A, 8, stored=KEYS[4:5])
    assert index.matches(KEYS) == {A: 5}


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_keys_per_worker=3)
    index.snapshot(A, 0, KEYS)
    assert index.num_keys == 3
    assert index.state(A) is IndexState.PARTIAL
    assert index.apply(A, 1, stored=KEYS[:2])  # no snapshot would make it exact
    assert index.num_keys == 3
    assert not index.apply(A, 3, stored=KEYS[2:3])
    assert index.state(A) is IndexState.DEGRADED


def test_removing_a_worker_forgets_it_and_reuses_its_bit() -> None:
    index = PrefixIndex()
    index.snapshot(A, 0, KEYS[:2])
    index.snapshot(B, 0, KEYS[:1])
    index.remove_worker(A)
    index.remove_worker(A)
    assert index.matches(KEYS) == {B: 1}
    assert index.num_keys == 1
    index.snapshot(C, 0, KEYS[:3])
    assert index.matches(KEYS) == {B: 1, C: 3}


def test_a_thousand_keys_on_eight_workers_match_fast() -> None:
    keys = block_keys(root_key("model"), pack_ids(range(1000)), 1)
    index = PrefixIndex()
    for i in range(8):
        index.snapshot(WorkerId(str(i)), 0, keys[: 1000 - 50 * i])
    best = min(_timed(index, keys) for _ in range(20))
    reference = min(_timed_reads(keys) for _ in range(20))
    assert best < 10 * reference, f"{best * 1e6:.0f} us, {reference * 1e6:.0f} us for plain dictionary reads"


def _timed(index: PrefixIndex, keys: list[BlockKey]) -> float:
    start = time.perf_counter()
    assert len(index.matches(keys)) == 8
    return time.perf_counter() - start


def _timed_reads(keys: list[BlockKey]) -> float:
    plain = dict.fromkeys(keys, 255)
    start = time.perf_counter()
    for key in keys:
        plain.get(key, 0)
    return time.perf_counter() - start


class IndexMachine(RuleBasedStateMachine):
    """Workers with logs; events may be lost. EXACT means equal to the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.logs = {worker: EventLog() for worker in (A, B)}
        self.truth: dict[WorkerId, set[BlockKey]] = {A: set(), B: set()}

    @rule(worker=st.sampled_from([A, B]), keys=st.sets(st.sampled_from(KEYS)), lost=st.booleans())
    def change(self, worker: WorkerId, keys: set[BlockKey], lost: bool) -> None:
        removed = sorted(keys & self.truth[worker])
        stored = sorted(keys - self.truth[worker])
        self.truth[worker] ^= keys
        for event in self.logs[worker].append(stored, removed):
            if not lost:
                keys_of = {"stored": map(BlockKey, event.stored.keys), "removed": map(BlockKey, event.removed.keys)}
                ok = self.index.apply(worker, event.sequence, **keys_of)
                assert ok == (self.index.state(worker) is not IndexState.DEGRADED)

    @rule(worker=st.sampled_from([A, B]))
    def resync(self, worker: WorkerId) -> None:
        event = self.logs[worker].snapshot()
        self.index.snapshot(worker, event.sequence, [*map(BlockKey, event.snapshot.keys)])

    @rule(worker=st.sampled_from([A, B]))
    def restart(self, worker: WorkerId) -> None:
        self.index.remove_worker(worker)
        self.logs[worker] = EventLog()
        self.truth[worker] = set()

    @invariant()
    def exact_means_exact(self) -> None:
        for worker, log in self.logs.items():
            if self.index.state(worker) is IndexState.EXACT and self.index._workers[worker].sequence == log.sequence:
                expected = 0
                while expected < len(KEYS) and KEYS[expected] in self.truth[worker]:
                    expected += 1
                assert self.index.matches(KEYS).get(worker, 0) == expected
                assert self.index.num_worker_keys(worker) == len(self.truth[worker])
        masks = self.index._mask
        held = [set(entry.keys) for entry in self.index._workers.values()]
        assert set(masks) == set().union(*held)
        assert all(masks.values())


IndexMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestIndex = IndexMachine.TestCase


def test_numbers_are_consecutive_and_a_snapshot_takes_none() -> None:
    log = EventLog()
    assert log.snapshot() == pb.KvEvent(sequence=0, snapshot=pb.BlockKeys())
    assert log.append([], []) == []
    assert log.append(KEYS[:2], []) == [pb.KvEvent(sequence=1, stored=pb.BlockKeys(keys=KEYS[:2]))]
    assert log.append([KEYS[2]], [KEYS[0]]) == [
        pb.KvEvent(sequence=2, removed=pb.BlockKeys(keys=[KEYS[0]])),
        pb.KvEvent(sequence=3, stored=pb.BlockKeys(keys=[KEYS[2]])),
    ]
    assert log.snapshot() == pb.KvEvent(sequence=3, snapshot=pb.BlockKeys(keys=KEYS[1:3]))
    assert log.append([KEYS[3]], [])[0].sequence == 4
    assert len(log.snapshot().snapshot.keys) == 3
