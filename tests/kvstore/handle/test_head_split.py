"""Resharding of heads: every pair of writer and reader ranks gets the bytes that slicing a whole block would give."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import HandshakeError, TransferError
from engine.windows.layout import windowed_attention
from kvstore.handle.handle import PeerShard, ShardAddress
from kvstore.handle.head_split import ShardPart, are_of_one_worker, split_blocks
from kvstore.layout import HeadCopy, PoolGeometry, Shard, full_attention
from kvstore.transports import head_parts
from kvstore.transports.client import KvClient
from kvstore.transports.cuda_ipc.reader import CudaIpcReader
from kvstore.transports.shared_memory import blocks_over, map_fd
from kvstore.transports.transport import Blocks
from kvstore.types import BlockId, Epoch, LeaseId, WorkerId
from tests.kvstore.helpers import OTHER_DTYPE, empty_pool, host_client, with_shard
from tests.kvstore.ranks import BLOCK_SIZE, HEAD_DIM, LATENTS, Ranks, geometry_of, running, shard_of, whole_blocks
from worker.cuda_ipc.mapped_pulls import AttachedPool, MappedPulls
from worker.gpu_hand_off.device_pool import DevicePool

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # peers' pools are not
RANKS = [
    (heads, writers, readers)
    for heads in (1, 2, 3, 4, 8)
    for writers in (1, 2, 3, 4, 6, 8)
    for readers in (1, 2, 3, 4, 6, 8)
    if all(heads % size == 0 or size % heads == 0 for size in (writers, readers))
]


def spans(part: ShardPart, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Return (source, target, bytes) of every range that the part copies."""
    copy = part.copy or HeadCopy(1, block_bytes, 0, block_bytes, 0, block_bytes)
    for i in range(copy.height):
        yield i * copy.source_pitch + copy.source_offset, i * copy.target_pitch + copy.target_offset, copy.width


TWO = [geometry_of(2, Shard(rank, 2)) for rank in range(2)]
FIRST, REST, ALL = (geometry_of(2, Shard(layers=bounds)) for bounds in ((0, 1), (1, 3), (0, 2)))


@pytest.mark.parametrize(
    ("pools", "are_complete"),
    [
        (TWO, True), ([REST, FIRST], True), ([FIRST], False), ([FIRST, FIRST], False), ([FIRST, ALL], False),
        ([FIRST, geometry_of(2, Shard())], False), (TWO[:1], False), (TWO[::-1], False), (TWO[:1] * 2, False),
        ([TWO[0], replace(TWO[1], layout=full_attention(3, 2, 8, "float32"))], False),
        ([TWO[0], replace(TWO[1], fingerprint="other")], False),
    ],
)  # fmt: skip
def test_shards_are_read_when_they_are_all_those_of_one_worker(pools: list[PoolGeometry], are_complete: bool) -> None:
    assert are_of_one_worker(pools) is are_complete
    shards = [PeerShard(LeaseId("l"), WorkerId("w"), Epoch(1), pool, ShardAddress(), (), ()) for pool in pools]
    mine = geometry_of(2, Shard(1, 2, (1, 2)))
    with nullcontext() if are_complete else pytest.raises(TransferError, match="not all those of one worker"):
        head_parts.head_parts(mine, shards)


@pytest.mark.parametrize(("heads", "writers", "readers"), RANKS)
def test_spans_are_the_slices_of_a_whole_block(heads: int, writers: int, readers: int) -> None:
    blocks = whole_blocks(heads, 1)
    sources = [shard_of(blocks, geometry_of(heads, Shard(rank, writers)))[0] for rank in range(writers)]
    for rank in range(readers):
        mine = geometry_of(heads, Shard(rank, readers))
        target = np.full(mine.block_bytes, 255, dtype=np.uint8)
        written = np.zeros(mine.block_bytes, dtype=int)
        for part in split_blocks(mine, tuple(ranks_of(writers))):
            for source, to, count in spans(part, mine.block_bytes):
                target[to : to + count] = sources[part.rank][source : source + count]
                written[to : to + count] += 1
        assert (written == 1).all()
        np.testing.assert_array_equal(target, shard_of(blocks, mine)[0])


@pytest.mark.parametrize(("heads", "size"), [(8, 1), (8, 2), (8, 8), (2, 4), (1, 3)])
def test_equal_shards_are_whole_blocks_of_the_same_rank(heads: int, size: int) -> None:
    for rank in range(size):
        assert split_blocks(geometry_of(heads, Shard(rank, size)), tuple(ranks_of(size))) == (ShardPart(rank, None),)


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_latents_are_whole_blocks_of_any_rank(writers: int, readers: int) -> None:
    parts = [
        split_blocks(geometry_of(LATENTS, Shard(rank, readers)), tuple(ranks_of(writers))) for rank in range(readers)
    ]
    assert parts == [(ShardPart(rank % writers, None),) for rank in range(readers)]


def test_equal_heads_are_whole_blocks_and_all_ranks_serve() -> None:
    assert split_blocks(geometry_of(2, Shard(1, 2)), tuple(ranks_of(4))) == (
        ShardPart(3, None),
    )  # ranks 2 and 3 hold head 1
    served = Counter(split_blocks(geometry_of(1, Shard(rank, 8)), tuple(ranks_of(4)))[0].rank for rank in range(8))
    assert served == dict.fromkeys(range(4), 2)


class HostMemoryPulls(MappedPulls):
    """Maps host memory as if it were a peer GPU's. The copies are those of a device pool on a CPU."""

    def attach(self, fd: int, num_blocks: int, block_bytes: int) -> AttachedPool:
        mapping = map_fd(fd, num_blocks * block_bytes, False)
        blocks = torch.from_numpy(blocks_over(mapping, num_blocks, block_bytes))
        return AttachedPool(NoMemory(), blocks.view(torch.int64))  # type: ignore[arg-type]


class NoMemory:
    def close(self) -> None: ...


def client_of(geometry: PoolGeometry, mine: Blocks, transport: str) -> KvClient:
    if transport != "cuda_ipc":
        return host_client(geometry, mine)
    return KvClient(geometry, {"cuda_ipc": CudaIpcReader(HostMemoryPulls(DevicePool(torch.from_numpy(mine))))})


async def check_pulls(worker: Ranks, transport: str, readers: Sequence[PoolGeometry]) -> None:
    """Check that each reader gets its part of the blocks, where it asked for them and nowhere else."""
    lease = worker.lease([4, 1, 2, 0, 5], transport)
    for geometry in readers:
        mine = empty_pool(geometry)
        client = client_of(geometry, mine, transport)
        used = await asyncio.to_thread(client.pull, lease, [0, 1, 2, 4], [BlockId(b) for b in (5, 0, 3, 1)])
        assert used == transport
        np.testing.assert_array_equal(mine[[5, 0, 3, 1]], shard_of(worker.blocks[[4, 1, 2, 5]], geometry))
        assert not mine[[2, 4]].any()
        client.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
@pytest.mark.parametrize(
    ("heads", "writers", "readers"),
    [(4, 2, 1), (4, 1, 2), (8, 2, 4), (2, 4, 1), (2, 1, 4), (2, 2, 2), (LATENTS, 3, 1), (LATENTS, 1, 2)],
)
async def test_pools_of_other_ranks_arrive(
    tmp_path: Path, transport: str, heads: int, writers: int, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_parts, "SCRATCH_BYTES", 2 * geometry_of(heads, Shard()).block_bytes)  # several pieces
    async with running(tmp_path, heads, writers) as worker:
        await check_pulls(worker, transport, [geometry_of(heads, Shard(rank, readers)) for rank in range(readers)])


def stages(*bounds: int) -> list[Shard]:
    """Return stages in a worker's order: the last stage first."""
    found = [Shard(layers=(first, stop)) for first, stop in pairwise(bounds)]
    return [found[-1], *found[:-1]]


def ranks_of(size: int, stages: Sequence[Shard] = (Shard(),)) -> list[Shard]:
    return [replace(stage, rank=rank, size=size) for stage in stages for rank in range(size)]


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "tcp"])
@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        (stages(0, 1, 3), [Shard()]),
        ([Shard()], stages(0, 2, 3)),
        (stages(0, 1, 3), stages(0, 2, 3)),
        (stages(0, 1, 2, 3), stages(0, 1, 3)),
        (stages(0, 2, 3), stages(0, 2, 3)),
        (ranks_of(2, stages(0, 2, 3)), ranks_of(2, stages(0, 2, 3))),
        (ranks_of(2, stages(0, 2, 3)), stages(0, 1, 3)),
        (ranks_of(4, stages(0, 2, 3)), ranks_of(2)),
        (stages(0, 1, 3), ranks_of(4)),
        (ranks_of(2), ranks_of(4, stages(0, 1, 2, 3))),
    ],
    ids=lambda shards: "+".join(f"{shard.rank}/{shard.size}:{shard.layers}" for shard in shards),
)
async def test_pools_of_other_stages_arrive(
    tmp_path: Path, transport: str, writers: list[Shard], readers: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_parts, "SCRATCH_BYTES", 2 * geometry_of(4, Shard()).block_bytes)  # several pieces
    async with running(tmp_path, 4, 0, writers) as worker:
        await check_pulls(worker, transport, [geometry_of(4, shard) for shard in readers])


@pytest.mark.parametrize("size", [1, 2])
def test_equal_stages_of_equal_ranks_read_whole_blocks(size: int) -> None:
    writers = tuple(ranks_of(size, stages(0, 1, 3)))
    for index, shard in enumerate(writers):
        assert split_blocks(geometry_of(2, shard), writers) == (ShardPart(index, None),)


def test_blocks_of_groups_are_read_from_stages_of_the_same_layers() -> None:
    """Five groups of one layer: stages have none of some, and blocks of one layer all the same."""
    layout = windowed_attention([64, 64, 0, 64, 64], 2, HEAD_DIM, "bfloat16")
    writers = tuple(ranks_of(2, stages(0, 3, 5)))
    for shard in (*writers, *stages(0, 3, 5)):
        geometry = PoolGeometry(layout, 6, BLOCK_SIZE, "f", shard)
        assert geometry.block_shape[0] == 1
        parts = split_blocks(geometry, writers)
        if shard in writers:
            assert parts == (ShardPart(writers.index(shard), None),)
            continue
        written = Counter(
            place
            for part in parts
            for _, to, count in spans(part, geometry.block_bytes)
            for place in range(to, to + count)
        )
        assert written == dict.fromkeys(range(geometry.block_bytes), 1)
    with pytest.raises(HandshakeError, match="one --pp"):
        split_blocks(PoolGeometry(layout, 6, BLOCK_SIZE, "f"), writers)


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2)])
async def test_a_wrong_byte_in_any_shard_is_refused(
    tmp_path: Path, transport: str, writers: int, readers: int
) -> None:
    """Also one among heads that this reader does not take."""
    async with running(tmp_path, 4, writers) as worker:
        geometry = geometry_of(4, Shard(0, readers))
        client = client_of(geometry, empty_pool(geometry), transport)
        for owner in worker.owners:
            lease = worker.lease([3], transport)
            owner.blocks[3, -1] ^= 1
            with pytest.raises(TransferError, match="intact"):
                client.pull(lease, [0], [BlockId(0)])
        client.close()


async def test_other_layouts_are_not_compatible_however_they_are_divided(tmp_path: Path) -> None:
    async with running(tmp_path, 4, 2) as worker:
        for other in (geometry_of(8, Shard()), OTHER_DTYPE):
            client = host_client(other, empty_pool(other))
            with pytest.raises(HandshakeError, match=r"KV layout: .* 8"):
                client.pull(worker.lease([1], "shm"), [0], [BlockId(0)])
            client.close()


async def test_a_handle_that_lies_about_its_shard_is_the_peers_error(tmp_path: Path) -> None:
    """Also when the pool is mapped already, by an honest handle."""
    async with running(tmp_path, 4, 1) as worker:
        geometry = geometry_of(4, Shard())
        client = host_client(geometry, empty_pool(geometry))
        for transport in ("shm", "tcp"):
            honest = worker.lease([1], transport)
            await asyncio.to_thread(client.pull, honest, [0], [BlockId(0)])
            halves = [with_shard(honest, geometry=geometry_of(4, Shard(rank, 2))) for rank in range(2)]
            lie = replace(honest, shards=tuple(half.shards[0] for half in halves))
            with pytest.raises(TransferError):
                await asyncio.to_thread(client.pull, lie, [0], [BlockId(0)])
        client.close()
