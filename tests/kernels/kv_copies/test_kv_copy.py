from __future__ import annotations

import pytest
import torch

from kernels.gpu.kv_copies import kv_copy as gpu
from kernels.kv_copies import kv_copy as reference
from kernels.kv_copies.kv_copy import WordCopy
from kvstore.pool.digest import digest_blocks, digest_weights


def random_words(num_blocks: int, num_words: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (num_blocks, num_words), dtype=torch.int64, device=device)


def weights_for(num_words: int, device: torch.device) -> torch.Tensor:
    return torch.stack([torch.from_numpy(w) for w in digest_weights(num_words)]).to(device)


@pytest.mark.parametrize(("num_ids", "num_words"), [(1, 8), (9, 1024), (13, 1500), (3, 5003)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copies_what_it_should_and_digests_it(
    num_ids: int, num_words: int, dtype: torch.dtype, device: torch.device
) -> None:
    source, target = random_words(20, num_words, device), random_words(17, num_words, device)
    before = target.clone()
    source_ids = torch.randperm(20, device=device)[:num_ids].to(dtype)
    target_ids = torch.randperm(17, device=device)[:num_ids].to(dtype)
    weights = weights_for(num_words, device)
    digests = gpu.copy_blocks(source, source_ids, target, target_ids, weights)
    assert torch.equal(target[target_ids.long()], source[source_ids.long()])
    others = [i for i in range(17) if i not in target_ids.tolist()]
    assert torch.equal(target[others], before[others])
    want = digest_blocks(source[source_ids.long()].cpu().numpy().view("uint8"))
    assert digests is not None
    assert [int(value) & (1 << 64) - 1 for value in digests.tolist()] == want
    assert torch.equal(digests, gpu.digest_blocks(source, source_ids, weights))
    assert torch.equal(digests, reference.digest_blocks(source, source_ids, weights))


def test_copies_without_digests(device: torch.device) -> None:
    source, target = random_words(4, 100, device), random_words(4, 100, device)
    other = target.clone()
    ids = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    assert gpu.copy_blocks(source, ids[0], target, ids[1]) is None
    assert reference.copy_blocks(source, ids[0], other, ids[1]) is None
    assert torch.equal(target, other)


@pytest.mark.parametrize(
    "copy",
    [
        WordCopy(height=6, width=512, source_offset=0, source_pitch=512, target_offset=512, target_pitch=1024),
        WordCopy(height=6, width=96, source_offset=96, source_pitch=288, target_offset=0, target_pitch=96),
        WordCopy(height=3, width=700, source_offset=700, source_pitch=1400, target_offset=700, target_pitch=2100),
        WordCopy(height=2, width=96, source_offset=864 + 96, source_pitch=288, target_offset=192, target_pitch=192),
    ],
    ids=["all into half", "a third", "half into a third", "a third of some layers"],
)
def test_copies_parts_and_digests_whole_blocks(copy: WordCopy, device: torch.device) -> None:
    source = random_words(7, 6 * copy.source_pitch, device)
    target = random_words(9, (copy.height + 1) * copy.target_pitch, device)
    other = target.clone()
    ids = torch.tensor([[3, 1, 6, 0, 2], [8, 2, 0, 4, 5]], dtype=torch.int32, device=device)
    weights = weights_for(source.shape[1], device)
    found = gpu.copy_blocks(source, ids[0], target, ids[1], weights, copy)
    want = reference.copy_blocks(source, ids[0], other, ids[1], weights, copy)
    assert torch.equal(target, other)
    assert found is not None
    assert want is not None
    assert torch.equal(found, want)
    assert torch.equal(found, reference.digest_blocks(source, ids[0], weights))
    with pytest.raises(ValueError, match="do not fit"):
        gpu.copy_blocks(source, ids[0], target[:, :-1].contiguous(), ids[1], weights, copy)


def test_nothing_to_do_is_fine(device: torch.device) -> None:
    words = random_words(2, 16, device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    digests = gpu.copy_blocks(words, none, words, none, weights_for(16, device))
    assert digests is not None
    assert digests.shape == (0,)


def test_rows_of_other_lengths_are_refused(device: torch.device) -> None:
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="same length"):
        gpu.copy_blocks(random_words(2, 16, device), ids, random_words(2, 8, device), ids)
