"""Descriptions of pools: bounded, and compared before the first byte moves."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import HandshakeError
from kvstore.handle.pool_info import (
    PoolInfo,
    check_compatible,
    geometry_from_wire,
    geometry_to_wire,
    info_from_wire,
    info_to_wire,
)
from kvstore.layout import Shard
from kvstore.types import Epoch, WorkerId
from tests.kvstore.helpers import GEOMETRY, OTHER_DTYPE

INFO = PoolInfo(WorkerId("w"), Epoch(2**64 - 1), replace(GEOMETRY, shard=Shard(1, 2)))
GOOD: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(geometry_to_wire(GEOMETRY)))


def test_a_description_survives_the_wire() -> None:
    assert info_from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(info_to_wire(INFO)))) == INFO


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([0], "1"), ([1], "f" * 2000), ([2], 0), ([2], 2**32 - 1), ([3], 0), ([3], 2**31), ([4], 1), ([4], -1),
        ([5], 0), ([5], 3), ([6], []), ([6], [[]]), ([6], GOOD[6] * 2), ([6], GOOD[6] * 20), ([6, 0, 1], "latent"),
        ([6, 0, 1], "other"), ([6, 0, 2], []), ([6, 0, 2], ["0"]), ([6, 0, 2], [2**40]),
        ([6, 0, 2], list(range(2**17))), ([6, 0, 3], 0), ([6, 0, 3], 2**32 - 1), ([6, 0, 5], "complex128"),
        ([6, 0, 6], 1), ([6, 0, 7], 5),
    ],
)  # fmt: skip
def test_impossible_descriptions_are_refused(path: list[int], value: object) -> None:
    wire = copy.deepcopy(GOOD)
    place = wire
    for index in path[:-1]:
        place = place[index]
    assert geometry_from_wire(wire) == GEOMETRY
    place[path[-1]] = value
    with pytest.raises(HandshakeError):
        geometry_from_wire(wire)


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists))
def test_nonsense_is_refused(value: object) -> None:
    for read in (info_from_wire, geometry_from_wire):
        with pytest.raises(HandshakeError):
            read(value)


def test_another_version_is_named() -> None:
    with pytest.raises(HandshakeError, match=r"by version 9, .* same version"):
        geometry_from_wire([9, *GOOD[1:]])


def test_blocks_and_shards_may_differ_and_all_else_is_named() -> None:
    check_compatible(replace(GEOMETRY, num_blocks=99), GEOMETRY, INFO.worker_id)
    check_compatible(replace(GEOMETRY, shard=Shard(1, 2)), GEOMETRY, INFO.worker_id)
    with pytest.raises(HandshakeError) as raised:
        check_compatible(GEOMETRY, replace(OTHER_DTYPE, fingerprint="other"), INFO.worker_id)
    for part in ("worker w", "model: test-model here, other there", "dtype: float32 here, bfloat16 there", "--model"):
        assert part in str(raised.value)
    assert "block size" not in str(raised.value)
