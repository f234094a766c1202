"""Block keys: their inputs, and equality of incremental and whole computation."""

import hashlib
import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.token_ids import pack_ids
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.types import BlockKey

ROOT = root_key("model")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_formula() -> None:
    expected = hashlib.sha256(ROOT + struct.pack("<3I", 1, 70000, 2**32 - 1)).digest()
    assert block_keys(ROOT, pack_ids([1, 70000, 2**32 - 1]), 3) == [expected]


def test_root_separates_its_fields() -> None:
    roots = {
        root_key(*fields)
        for fields in [("ab", "", ""), ("a", "b", ""), ("a", "", "b"), ("", "ab", ""), ("", "a", "b"), ("a\0b",)]
    }
    assert len(roots) == 6
    assert root_key("x") == root_key("x", "", "")


def keys_of(token_ids: Sequence[int], block_size: int, parent: BlockKey = ROOT) -> list[BlockKey]:
    return block_keys(parent, pack_ids(token_ids), block_size)


def test_only_full_blocks_have_keys() -> None:
    assert keys_of(range(7), 8) == []
    assert len(keys_of(range(8), 8)) == 1
    assert len(keys_of(range(23), 8)) == 2


def test_a_key_depends_on_all_tokens_before() -> None:
    a = keys_of([1, 2, 3, 4, 5, 6], 2)
    b = keys_of([1, 9, 3, 4, 5, 6], 2)
    assert not set(a) & set(b)
    assert keys_of([1, 2, 3, 9], 2)[0] == a[0]


@given(tokens, st.integers(1, 9), st.integers(0, 5))
def test_going_on_from_a_block(token_ids: list[int], block_size: int, num_first: int) -> None:
    first = keys_of(token_ids[: num_first * block_size], block_size)
    rest = keys_of(token_ids[num_first * block_size :], block_size, first[-1] if first else ROOT)
    assert first + rest == keys_of(token_ids, block_size)
