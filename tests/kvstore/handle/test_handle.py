"""KV handles: they round-trip, and malformed ones of peers raise a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandshakeError, TransferError
from kvstore.handle.handle import (
    HandleShard,
    HandleWriter,
    PoolInfo,
    ShardAddress,
    from_wire,
    open_handle,
    pack_shard,
)
from kvstore.layout import Shard
from kvstore.pool.leases import LeaseTable
from kvstore.types import BlockId, Epoch, WorkerId
from protos import types_pb2 as pb
from tests.kvstore.helpers import GEOMETRY

ADDRESS = ShardAddress("host:1", True, {"shm": b"/run/a.sock", "tcp": b"", "other": b"\xff"})
BLOCKS, DIGESTS = [BlockId(5), BlockId(0), BlockId(7)], [2**64 - 1, 0, 3]
SHARD = pack_shard(GEOMETRY, ADDRESS, BLOCKS, DIGESTS)
FIRST, GROUP = ["layout", "groups", 0], asdict(GEOMETRY.layout.groups[0])
GOOD = pb.KvHandle(lease_id="x", worker_id="w", epoch=9, num_tokens=12, lease_seconds=10.0, shards=[SHARD])


def shard_of(rank: int, size: int, **changes: Any) -> bytes:
    geometry = replace(changes.pop("geometry", GEOMETRY), shard=Shard(rank, size))
    return pack_shard(geometry, ADDRESS, changes.pop("blocks", BLOCKS), changes.pop("digests", DIGESTS))


def changed(handle: pb.KvHandle, **fields: Any) -> pb.KvHandle:
    """Return the handle with other values of some fields."""
    known = {field.name: getattr(handle, field.name) for field in handle.DESCRIPTOR.fields}
    return pb.KvHandle(**known | fields)


def test_a_handle_survives_its_way() -> None:
    lease = LeaseTable(Epoch(2**64 - 1)).grant(BLOCKS, 0.0, 30.0)
    handle = HandleWriter("w", [HandleShard(GEOMETRY, ADDRESS)], 30.0).write(lease, 12, [DIGESTS])
    read = open_handle(pb.KvHandle.FromString(handle.SerializeToString()))
    assert (read.lease_id, read.worker_id, read.epoch) == (lease.lease_id, "w", 2**64 - 1)
    assert (read.num_tokens, read.lease_seconds, read.num_blocks, read.kv_address) == (12, 30.0, 3, "host:1")
    [shard] = read.shards
    assert (shard.geometry, shard.address) == (GEOMETRY, ADDRESS)
    assert (list(shard.block_ids), list(shard.digests)) == (BLOCKS, DIGESTS)


def test_a_description_of_a_pool_survives_its_way() -> None:
    info = PoolInfo(WorkerId("w"), Epoch(2**64 - 1), replace(GEOMETRY, shard=Shard(1, 2, (0, 1))))
    assert from_wire(PoolInfo, msgspec.msgpack.decode(msgspec.msgpack.encode(info)), "pool") == info


@pytest.mark.parametrize(
    "shards", [[], [SHARD] * 300, [shard_of(0, 2), shard_of(1, 2, blocks=BLOCKS[:2], digests=DIGESTS[:2])]]
)
def test_shards_that_do_not_belong_together(shards: list[bytes]) -> None:
    with pytest.raises(TransferError):
        open_handle(changed(GOOD, shards=shards))


def with_value(path: Sequence[int | str], value: object) -> pb.KvHandle:
    """Return the handle with another value somewhere in its shard."""
    wire: Any = msgspec.msgpack.decode(SHARD)
    place = wire
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed(GOOD, shards=[msgspec.msgpack.encode(wire)])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([1], None), ([1], [1] * 7), ([2], []), ([2, "needs_staging"], 1), ([2, "kv_address"], 0),
        ([2, "kv_address"], "h" * 2000), ([2, "transports"], []), ([2, "transports"], {"a": "text"}),
        ([2, "transports"], {"n" * 2000: b""}), ([2, "transports"], {"a": bytes(1 << 17)}),
        ([2, "transports"], {str(number): b"" for number in range(65)}), ([3], b""), ([3], b"123"), ([3], [1]),
        ([4], b"\0" * 8), ([4], b"\0" * 23), ([4], 7),
    ],
)  # fmt: skip
def test_a_malformed_shard_is_the_peers_error(path: list[int | str], value: object) -> None:
    with pytest.raises(TransferError, match="malformed"):
        open_handle(with_value(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["fingerprint"], "f" * 2000), (["num_blocks"], 0), (["num_blocks"], 2**32 - 1), (["block_size"], 0),
        (["block_size"], 2**31), (["shard", "rank"], 1), (["shard", "rank"], -1), (["shard", "size"], 0),
        (["shard", "size"], 3), (["shard", "layers"], [1, 1]), (["layout", "groups"], []),
        (["layout", "groups"], [{}]), (["layout", "groups"], [GROUP] * 2), (["layout", "groups"], [GROUP] * 20),
        ([*FIRST, "name"], "n" * 2000), ([*FIRST, "kind"], "latent"), ([*FIRST, "kind"], "other"),
        ([*FIRST, "layers"], []), ([*FIRST, "layers"], ["0"]), ([*FIRST, "layers"], [2**40]),
        ([*FIRST, "layers"], list(range(2**17))), ([*FIRST, "num_kv_heads"], 0),
        ([*FIRST, "num_kv_heads"], 2**32 - 1), ([*FIRST, "dtype"], "complex128"), ([*FIRST, "num_planes"], 1),
        ([*FIRST, "window"], 5),
    ],
)  # fmt: skip
def test_an_impossible_pool_is_the_peers_error(path: list[int | str], value: object) -> None:
    with pytest.raises((HandshakeError, TransferError)):
        open_handle(with_value([1, *path], value))


@settings(max_examples=30)  # each takes long to make up
@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists))
def test_nonsense_describes_no_pool(value: object) -> None:
    with pytest.raises(TransferError, match="malformed pool"):
        from_wire(PoolInfo, value, "pool")


@pytest.mark.parametrize("number", [1, 4, "5.9", None])
def test_handles_of_other_versions_are_refused_with_what_to_do(number: object) -> None:
    with pytest.raises(HandshakeError, match=rf"format {number}, not 5\.\d: run the same version everywhere"):
        open_handle(with_value([0], number))


def test_an_address_that_is_no_text_is_the_peers_error() -> None:
    [shard] = open_handle(GOOD).shards
    assert shard.address_for("shm") == "/run/a.sock"
    with pytest.raises(TransferError, match="malformed address for other"):
        shard.address_for("other")


@given(st.binary(max_size=200), st.integers(0, len(SHARD)))
def test_random_bytes_are_refused(data: bytes, cut: int) -> None:
    for shard in (data, SHARD[:cut] + data + SHARD[cut:][1:], SHARD[:cut]):
        try:
            lease = open_handle(changed(GOOD, shards=[shard]))
        except (TransferError, HandshakeError):
            continue
        assert len(lease.shards[0].digests) == lease.num_blocks  # by chance it is a handle


def test_a_handle_without_a_lease_is_refused() -> None:
    with pytest.raises(TransferError, match="malformed"):
        open_handle(changed(GOOD, lease_id=""))
    with pytest.raises(TransferError, match="size"):
        open_handle(changed(GOOD, shards=[bytes(17 << 20)]))
    with pytest.raises(TransferError, match="malformed"):
        open_handle(changed(GOOD, shards=[b"\x91" * 100_000]))
