"""The digest: three implementations of its formula, and the damage that it detects."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.errors import ConfigError
from kvstore.pool.digest import check_block_bytes, digest_blocks, digest_weights

RNG = np.random.default_rng(5)
Block = npt.NDArray[np.uint8]


def random_block(num_bytes: int = 1024) -> Block:
    return RNG.integers(0, 256, num_bytes, dtype=np.uint8)


def digest(block: Block) -> int:
    return digest_blocks(block.reshape(1, -1))[0]


def test_formula_in_plain_integers() -> None:
    block = random_block(64)
    a, b = digest_weights(8)
    words = [int.from_bytes(block[i : i + 8].tobytes(), "little", signed=True) for i in range(0, 64, 8)]
    expected = sum(int(a[i]) * x + int(b[i]) * (x >> 32) for i, x in enumerate(words)) % 2**64
    assert digest(block) == expected
    assert all(int(w) % 2 for w in [*a, *b])


def test_torch_int64_arithmetic_gives_the_same() -> None:
    blocks = RNG.integers(0, 256, (3, 600_000), dtype=np.uint8)  # longer than one chunk
    words = torch.from_numpy(blocks).view(torch.int64)
    a, b = (torch.from_numpy(w) for w in digest_weights(words.shape[1]))
    sums = (words * a + (words >> 32) * b).sum(dim=1)
    assert digest_blocks(blocks) == [int(s) % 2**64 for s in sums]


def test_rows_of_a_strided_array_count_like_their_copies() -> None:
    wide = RNG.integers(0, 256, (4, 2048), dtype=np.uint8)
    assert digest_blocks(wide[:, 3:1027]) == digest_blocks(wide[:, 3:1027].copy())


def test_every_single_bit_flip_is_found() -> None:
    block = random_block(512)
    original = digest(block)
    for position in range(512 * 8):
        block[position // 8] ^= 1 << position % 8
        assert digest(block) != original, f"bit {position}"
        block[position // 8] ^= 1 << position % 8
    assert digest(block) == original


def test_the_same_bit_flipped_in_two_words_is_found() -> None:
    """sum(a_i * x_i) alone may miss this: it always does for bit 63."""
    block = random_block(256)
    original = digest(block)
    for bit in range(64):
        for second in range(1, 32):
            damaged = block.copy()
            for word in (0, second):
                damaged[8 * word + bit // 8] ^= 1 << bit % 8
            assert digest(damaged) != original, f"bit {bit} of words 0 and {second}"
    a, _ = digest_weights(32)
    damaged = block.copy()
    damaged[[7, 15]] ^= 0x80
    assert (block.view(np.int64) * a).sum() == (damaged.view(np.int64) * a).sum()  # why there are two weights


def test_sign_flips_of_16_and_32_bit_elements_are_found() -> None:
    for num_bytes in (2, 4):
        block = random_block()
        for stride in (1, 2, 4):
            damaged = block.copy()
            damaged[num_bytes - 1 :: num_bytes * stride] ^= 0x80
            assert digest(damaged) != digest(block)


def test_moved_words_halves_and_blocks_are_found() -> None:
    block, other = random_block(), random_block()
    halves = np.concatenate([block[512:], block[:512]])
    mixed = np.concatenate([block[:512], other[512:]])
    shifted = [np.roll(block, n) for n in (1, 2, 4, 8, 16, 256)]
    swapped = block.copy().view(np.uint64)
    swapped[[3, 90]] = swapped[[90, 3]]
    swapped_lanes = block.copy().view(np.uint32)
    swapped_lanes[[6, 7]] = swapped_lanes[[7, 6]]
    damaged = [halves, mixed, other, *shifted, swapped.view(np.uint8), swapped_lanes.view(np.uint8)]
    digests = [digest(d) for d in [block, *damaged]]
    assert len(set(digests)) == len(digests)


def test_missing_data_is_found() -> None:
    block = random_block()
    block[-8:] = 1
    for cut in (8, 16, 512, 1016, 1024):
        damaged = block.copy()
        damaged[-cut:] = 0
        assert digest(damaged) != digest(block)
    assert digest(np.zeros(1024, np.uint8)) == 0


def test_blocks_are_whole_words() -> None:
    with pytest.raises(ConfigError, match="block-size"):
        digest_blocks(np.zeros((1, 12), np.uint8))
    check_block_bytes(24)
    assert digest_blocks(np.zeros((0, 16), np.uint8)) == []
