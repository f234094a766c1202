"""KV handles: what was written is read, and whatever a peer makes up is a typed error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import HandshakeError, TransferError
from kvstore.handle.handle import HandleShard, HandleWriter, KvHandle, ShardAddress, open_handle, pack_shard
from kvstore.layout import Shard
from kvstore.pool.leases import LeaseTable
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId
from tests.kvstore.helpers import GEOMETRY, OTHER_DTYPE

ADDRESS = ShardAddress("host:1", True, {"shm": b"/run/a.sock", "tcp": b"", "other": b"\xff"})
BLOCKS, DIGESTS = [BlockId(5), BlockId(0), BlockId(7)], [2**64 - 1, 0, 3]
SHARD = pack_shard(GEOMETRY, ADDRESS, BLOCKS, DIGESTS)
GOOD = KvHandle(LeaseId("x"), WorkerId("w"), Epoch(9), 12, 10.0, [SHARD])


def shard_of(rank: int, size: int, **changes: Any) -> bytes:
    geometry = replace(changes.pop("geometry", GEOMETRY), shard=Shard(rank, size))
    return pack_shard(geometry, ADDRESS, changes.pop("blocks", BLOCKS), changes.pop("digests", DIGESTS))


def test_a_handle_survives_its_way() -> None:
    lease = LeaseTable(Epoch(2**64 - 1)).grant(BLOCKS, 0.0, 30.0)
    handle = HandleWriter("w", [HandleShard(GEOMETRY, ADDRESS)], 30.0).write(lease, 12, [DIGESTS])
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=KvHandle)
    read = open_handle(arrived)
    assert (read.lease_id, read.worker_id, read.epoch) == (lease.lease_id, "w", 2**64 - 1)
    assert (read.num_tokens, read.lease_seconds, read.num_blocks, read.kv_address) == (12, 30.0, 3, "host:1")
    [shard] = read.shards
    assert (shard.geometry, shard.address) == (GEOMETRY, ADDRESS)
    assert (list(shard.block_ids), list(shard.digests)) == (BLOCKS, DIGESTS)


def test_shards_of_several_ranks_belong_together() -> None:
    read = open_handle(replace(GOOD, shards=[shard_of(0, 2), shard_of(1, 2)]))
    assert [list(shard.geometry.heads) for shard in read.shards] == [[0], [1]]


def stage_of(first: int, stop: int) -> bytes:
    return pack_shard(replace(GEOMETRY, shard=Shard(layers=(first, stop))), ADDRESS, BLOCKS, DIGESTS)


def test_shards_of_several_stages_belong_together() -> None:
    read = open_handle(replace(GOOD, shards=[stage_of(1, 2), stage_of(0, 1)]))
    assert [list(shard.geometry.layers) for shard in read.shards] == [[1], [0]]
    assert [shard.pool_name[1] for shard in read.shards] == [0, 1]


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [stage_of(0, 1)],
        [stage_of(0, 1), stage_of(0, 1)],
        [stage_of(0, 1), stage_of(0, 2)],
        [stage_of(0, 1), SHARD],
        [SHARD] * 300,
        [shard_of(0, 2)],
        [shard_of(1, 2), shard_of(0, 2)],
        [shard_of(0, 2), shard_of(0, 2)],
        [shard_of(0, 2), shard_of(1, 2, blocks=BLOCKS[:2], digests=DIGESTS[:2])],
        [shard_of(0, 2), shard_of(1, 2, geometry=OTHER_DTYPE)],
        [shard_of(0, 2), shard_of(1, 2, geometry=replace(GEOMETRY, fingerprint="other"))],
    ],
)
def test_shards_that_do_not_belong_together(shards: list[bytes]) -> None:
    with pytest.raises(TransferError):
        open_handle(replace(GOOD, shards=shards))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (1, None), (1, [1] * 7), (2, []), (2, ["", False]), (2, ["", 1, {}]), (2, [0, False, {}]),
        (2, ["h" * 2000, False, {}]), (2, ["", False, {}, 0]), (2, ["", False, []]), (2, ["", False, {"a": "text"}]),
        (2, ["", False, {"n" * 2000: b""}]), (2, ["", False, {"a": bytes(1 << 17)}]),
        (2, ["", False, {str(number): b"" for number in range(65)}]), (3, b""), (3, b"123"), (3, [1]),
        (4, b"\0" * 8), (4, b"\0" * 23), (4, 7), (0, None),
    ],
)  # fmt: skip
def test_a_malformed_shard_is_the_peers_error(place: int, value: object) -> None:
    wire = msgspec.msgpack.decode(SHARD)
    wire[place] = value
    with pytest.raises((TransferError, HandshakeError)):
        open_handle(replace(GOOD, shards=[msgspec.msgpack.encode(wire)]))


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_handles_of_other_versions_are_refused_with_what_to_do(number: int) -> None:
    wire = msgspec.msgpack.decode(SHARD)
    wire[0] = number
    with pytest.raises(HandshakeError, match=rf"format {number}, not 4: run the same version everywhere"):
        open_handle(replace(GOOD, shards=[msgspec.msgpack.encode(wire)]))


def test_an_address_that_is_no_text_is_the_peers_error() -> None:
    [shard] = open_handle(GOOD).shards
    assert shard.address_for("shm") == "/run/a.sock"
    with pytest.raises(TransferError, match="malformed address for other"):
        shard.address_for("other")


@given(st.binary(max_size=200), st.integers(0, len(SHARD)))
def test_random_bytes_are_refused(data: bytes, cut: int) -> None:
    for shard in (data, SHARD[:cut] + data + SHARD[cut:][1:], SHARD[:cut]):
        try:
            lease = open_handle(replace(GOOD, shards=[shard]))
        except (TransferError, HandshakeError):
            continue
        assert len(lease.shards[0].digests) == lease.num_blocks  # by chance it is a handle


def test_a_handle_without_a_lease_is_refused() -> None:
    with pytest.raises(TransferError, match="malformed"):
        open_handle(replace(GOOD, lease_id=LeaseId("")))
    with pytest.raises(TransferError, match="size"):
        open_handle(replace(GOOD, shards=[bytes(17 << 20)]))
    with pytest.raises(TransferError, match="malformed"):
        open_handle(replace(GOOD, shards=[b"\x91" * 100_000]))
