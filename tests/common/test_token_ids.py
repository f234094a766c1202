"""Token ids as bytes: they round-trip, and anything else is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.token_ids import num_ids, pack_ids, unpack_ids


def test_format() -> None:
    assert pack_ids([1, 70000, 2**32 - 1]) == struct.pack("<3I", 1, 70000, 2**32 - 1)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_there_and_back(token_ids: list[int]) -> None:
    packed = pack_ids(token_ids)
    assert unpack_ids(packed) == token_ids
    assert num_ids(packed) == len(token_ids)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_that_does_not_fit_is_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([bad])


def test_bytes_that_are_no_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="7 bytes are not token ids"):
        unpack_ids(b"\0" * 7)
