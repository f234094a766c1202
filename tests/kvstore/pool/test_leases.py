"""Leases: every reference that a lease holds is released exactly once, in any order of events."""

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import TransferError
from kvstore.pool.block_pool import BlockPool
from kvstore.pool.leases import MAX_LEASE_SECONDS, LeaseTable, new_epoch
from kvstore.types import BlockId, Epoch, LeaseId

EPOCH = Epoch(7)
BLOCKS = [BlockId(4), BlockId(2), BlockId(9)]


def test_resolve_names_blocks_by_position_until_the_deadline() -> None:
    table = LeaseTable(EPOCH)
    lease = table.grant(BLOCKS, now=100.0, lease_seconds=10.0)
    assert table.resolve(lease.lease_id, EPOCH, [2, 0], now=109.9) == [9, 4]
    for position in (-1, 3):
        with pytest.raises(TransferError, match="outside"):
            table.resolve(lease.lease_id, EPOCH, [position], now=100.0)
    with pytest.raises(TransferError, match="epoch"):
        table.resolve(lease.lease_id, Epoch(8), [0], now=100.0)
    with pytest.raises(TransferError, match="unknown"):
        table.resolve(LeaseId("x"), EPOCH, [0], now=100.0)
    with pytest.raises(TransferError, match="expired"):
        table.resolve(lease.lease_id, EPOCH, [0], now=110.0)


def test_renew_extends_only_what_still_holds() -> None:
    table = LeaseTable(EPOCH)
    lease = table.grant(BLOCKS, 0.0, 10.0)
    assert table.renew(lease.lease_id, EPOCH, 9.0, 10.0)
    assert table.expire(18.9) == []
    assert not table.renew(lease.lease_id, Epoch(8), 9.0, 10.0)
    assert not table.renew(LeaseId("x"), EPOCH, 9.0, 10.0)
    assert not table.renew(lease.lease_id, EPOCH, 19.0, 10.0)
    assert table.expire(19.0) == [lease]
    assert len(table) == 0


@pytest.mark.parametrize("seconds", [math.nan, -5.0, 0.0, math.inf, 1e300])
def test_a_peers_wish_is_bounded(seconds: float) -> None:
    table = LeaseTable(EPOCH)
    lease = table.grant(BLOCKS, 0.0, 5.0)
    assert table.renew(lease.lease_id, EPOCH, 1.0, seconds)
    assert 5.0 <= lease.deadline <= 1.0 + MAX_LEASE_SECONDS


def test_a_second_table_resolves_like_the_first() -> None:
    table, mirror = LeaseTable(EPOCH), LeaseTable(EPOCH)
    lease = table.grant(BLOCKS, 0.0, 10.0)
    mirror.adopt(replace(lease))
    assert mirror.resolve(lease.lease_id, EPOCH, [1], 5.0) == table.resolve(lease.lease_id, EPOCH, [1], 5.0)


def test_names_are_not_guessable() -> None:
    table = LeaseTable(EPOCH)
    assert len({table.grant([], 0.0, 1.0).lease_id for _ in range(100)}) == 100
    assert len({new_epoch() for _ in range(100)}) == 100
    assert all(0 < new_epoch() < 1 << 64 for _ in range(100))


class LeaseMachine(RuleBasedStateMachine):
    """A pool and a table together: references in the pool equal those of running sequences and leases."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(8)
        self.table = LeaseTable(EPOCH)
        self.names: list[LeaseId] = []

    @rule(count=st.integers(1, 4), seconds=st.floats(0.1, 20.0))
    def finish_prefill(self, count: int, seconds: float) -> None:
        if count <= self.pool.num_available:
            blocks = self.pool.allocate(count)
            self.names.append(self.table.grant(blocks, self.now, seconds).lease_id)

    @rule(data=st.data(), stale=st.booleans())
    def release(self, data: st.DataObject, stale: bool) -> None:
        if self.names:
            name = data.draw(st.sampled_from(self.names))
            lease = self.table.release(name, Epoch(8) if stale else EPOCH)
            assert not (stale and lease)
            if lease is not None:
                self.pool.release(lease.block_ids)

    @rule(data=st.data(), seconds=st.floats(allow_nan=True, allow_infinity=True))
    def renew(self, data: st.DataObject, seconds: float) -> None:
        if self.names:
            self.table.renew(data.draw(st.sampled_from(self.names)), EPOCH, self.now, seconds)

    @rule(seconds=st.floats(0.0, 15.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.table.expire(self.now):
            self.pool.release(lease.block_ids)

    @invariant()
    def references_match(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == sum(len(lease.block_ids) for lease in self.table._leases.values())

    def teardown(self) -> None:
        self.time_passes(2 * MAX_LEASE_SECONDS)
        assert self.pool.num_free == 8
        assert len(self.table) == 0


LeaseMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestLeases = LeaseMachine.TestCase
