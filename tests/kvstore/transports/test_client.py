"""Pools between which KV may move, and those that are refused before the first byte moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import HandshakeError
from kvstore.layout import Shard
from kvstore.transports.client import check_compatible
from kvstore.types import WorkerId
from tests.kvstore.helpers import GEOMETRY, OTHER_DTYPE

WORKER = WorkerId("w")


def test_blocks_and_shards_may_differ_and_all_else_is_named() -> None:
    check_compatible(replace(GEOMETRY, num_blocks=99), GEOMETRY, WORKER)
    check_compatible(replace(GEOMETRY, shard=Shard(1, 2)), GEOMETRY, WORKER)
    with pytest.raises(HandshakeError) as raised:
        check_compatible(GEOMETRY, replace(OTHER_DTYPE, fingerprint="other"), WORKER)
    for part in ("worker w", "model: test-model here, other there", "dtype: float32 here, bfloat16 there", "--model"):
        assert part in str(raised.value)
    assert "block size" not in str(raised.value)
