"""Keys: what they depend on, and that the incremental form equals the whole one."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool.block_hash import block_key, block_keys, extend_keys, root_key

ROOT = root_key("model")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_formula() -> None:
    expected = hashlib.sha256(ROOT + struct.pack("<3I", 1, 70000, 2**32 - 1)).digest()
    assert block_key(ROOT, [1, 70000, 2**32 - 1]) == expected


def test_root_separates_its_fields() -> None:
    roots = {
        root_key(*fields)
        for fields in [
            ("ab", "", ""),
            ("a", "b", ""),
            ("a", "", "b"),
            ("", "ab", ""),
            ("", "a", "b"),
            ("a\0b",),
        ]
    }
    assert len(roots) == 6
    assert root_key("x") == root_key("x", "", "")


def test_only_full_blocks_have_keys() -> None:
    assert block_keys(range(7), 8, ROOT) == []
    assert len(block_keys(range(8), 8, ROOT)) == 1
    assert len(block_keys(range(23), 8, ROOT)) == 2


def test_a_key_depends_on_all_tokens_before() -> None:
    a = block_keys([1, 2, 3, 4, 5, 6], 2, ROOT)
    b = block_keys([1, 9, 3, 4, 5, 6], 2, ROOT)
    assert not set(a) & set(b)
    assert block_keys([1, 2, 3, 9], 2, ROOT)[0] == a[0]


@given(tokens, st.integers(1, 9), st.integers(0, 40))
def test_extending_equals_computing_at_once(token_ids: list[int], block_size: int, cut: int) -> None:
    whole = block_keys(token_ids, block_size, ROOT)
    keys = extend_keys([], token_ids[:cut], block_size, ROOT)
    assert extend_keys(keys, token_ids, block_size, ROOT) is keys
    assert keys == whole
    parent = ROOT
    for i, key in enumerate(whole):
        parent = block_key(parent, token_ids[i * block_size : (i + 1) * block_size])
        assert key == parent


def test_a_token_id_that_does_not_fit_is_refused() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            block_key(ROOT, [bad])
