"""Descriptions of pools: bounded, and compared before the first byte moves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import HandshakeError
from kvstore.transport import pool_info
from kvstore.transport.pool_info import PoolInfo, check_compatible
from kvstore.types import Epoch, WorkerId
from tests.kvstore.helpers import GEOMETRY, OTHER_DTYPE

INFO = PoolInfo(WorkerId("w"), Epoch(2**64 - 1), GEOMETRY, shm_socket="/run/x.sock")


def test_a_description_survives_the_wire() -> None:
    assert pool_info.from_bytes(pool_info.to_proto(INFO).SerializeToString()) == INFO


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", 2**32 - 1),
        ("block_bytes", 1),
        ("kv_dtype", "complex128"),
        ("block_shape", [2, 2, 2, 4]),
        ("block_shape", [2, 3, 2, 4, 8]),
        ("block_shape", [0, 2, 2, 4, 8]),
        ("block_shape", [2**32 - 1, 2, 2**32 - 1, 2**32 - 1, 2**32 - 1]),
    ],
)
def test_impossible_descriptions_are_refused(field: str, value: object) -> None:
    message = pool_info.to_proto(INFO)
    if isinstance(value, list):
        del message.block_shape[:]
        message.block_shape.extend(value)
    else:
        setattr(message, field, value)
    with pytest.raises(HandshakeError):
        pool_info.from_proto(message)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        pool_info.from_bytes(data)


def test_the_number_of_blocks_may_differ_and_all_else_is_named() -> None:
    check_compatible(replace(GEOMETRY, num_blocks=99), INFO)
    theirs = replace(
        INFO,
        geometry=replace(OTHER_DTYPE, fingerprint="other"),
        hash_version=9,
    )
    with pytest.raises(HandshakeError) as raised:
        check_compatible(GEOMETRY, theirs)
    for part in (
        "model: test-model here, other there",
        "dtype: float32 here, bfloat16 there",
        "hash version",
        "--model",
    ):
        assert part in str(raised.value)
    assert "block size" not in str(raised.value)
