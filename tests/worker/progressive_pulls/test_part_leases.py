"""Leases on prompts that are being computed: the blocks that they cover, and these blocks' digests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.token_ids import pack_ids
from engine.request import FinishReason, Request, RequestId, SamplingParams
from kvstore.handle.handle import HandleShard, HandleWriter, ShardAddress, open_handle
from kvstore.layout import PoolGeometry, full_attention
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.digest import digest_blocks
from kvstore.pool.leases import new_epoch
from kvstore.transports.transport import LocalPool
from kvstore.types import BlockId
from protos import types_pb2 as pb
from tests.engine.scheduling.engines import BLOCK, assert_quiet, make_engine
from worker.engine_process.figures import OpenRequest
from worker.kv.kv_leases import KvLeases, PromptLeases
from worker.progressive_pulls.part_leases import PartLeases

NUM_BLOCKS = 16
GEOMETRY = PoolGeometry(full_attention(2, 2, 8, "float32"), NUM_BLOCKS, BLOCK, "test")
PROMPT = list(range(1, 5 * BLOCK + 3))


class CountingLeases(KvLeases):
    """Counts the blocks whose digests are computed."""

    num_digested = 0

    def digests(self, block_ids: Sequence[BlockId]) -> list[list[int]]:
        self.num_digested += len(block_ids)
        return super().digests(block_ids)


class PrefillWorker:
    """An engine without a model, its leases, and blocks of random bytes."""

    def __init__(self, in_parts: bool = True) -> None:
        self.engine, _ = make_engine(NUM_BLOCKS, budget=2 * BLOCK)
        self.blocks = np.zeros((NUM_BLOCKS, GEOMETRY.block_bytes), dtype=np.uint8)
        self.write_blocks(seed=0)
        rank = LocalPool.__new__(LocalPool)  # without shared memory
        rank.host_blocks = self.blocks
        handles = HandleWriter("worker", [HandleShard(GEOMETRY, ShardAddress())], 10.0)
        self.leases = CountingLeases(new_epoch(), [rank], self.engine.kv.give_back, handles)
        self.exports = (PartLeases if in_parts else PromptLeases)(self.engine.kv, self.leases)
        self.open: dict[RequestId, OpenRequest] = {}

    def write_blocks(self, seed: int) -> None:
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, dtype=np.uint8)

    def submit(self, prompt: list[int], priority: int = 0) -> Request:
        request = self.engine.add_request(
            prompt, SamplingParams(max_tokens=2), priority=priority, prefill_only=True
        )  # fmt: skip
        self.open[request.request_id] = OpenRequest(request, 0.0, float("inf"))
        return request

    def step(self, request: Request) -> tuple[list[pb.KvOffer], pb.KvHandle | None]:
        """Take one turn of the loop; return offers of parts of the request's prompt, and the handle on the whole."""
        whole = None
        outcome = self.engine.step()
        for output in outcome.outputs:
            entry = self.open.pop(output.request.request_id)
            assert output.finish_reason is FinishReason.PREFILLED
            _, handle = self.exports.lease_prompt(entry, 1.0)
            if output.request is request:
                whole = handle
        leased = self.exports.lease_parts(outcome.prompt_chunks, self.open, 1.0)
        return [offer for _, offer in leased if offer.request_id == request.request_id], whole

    def finish(self, request: Request) -> tuple[list[pb.KvOffer], pb.KvHandle]:
        parts: list[pb.KvOffer] = []
        for _ in range(50):
            more, whole = self.step(request)
            parts += more
            if whole is not None:
                return parts, whole
        raise AssertionError("the prompt is not computed")

    def check(self, handle: pb.KvHandle, num_blocks: int) -> None:
        """Check that the digests in a handle equal those of its blocks."""
        (shard,) = open_handle(handle).shards
        assert len(shard.block_ids) == num_blocks
        assert list(shard.digests) == digest_blocks(self.blocks[list(shard.block_ids)])

    def end_leases(self) -> None:
        self.leases.expire(1000.0)
        assert_quiet(self.engine)


def test_each_chunk_is_leased_and_digested_once() -> None:
    worker = PrefillWorker()
    request = worker.submit(PROMPT)
    parts, whole = worker.finish(request)
    keys = block_keys(root_key("test"), pack_ids(PROMPT), BLOCK)
    assert [part.block_keys for part in parts] == [keys[:2], keys[2:4]]
    assert [part.kv_handle.num_tokens for part in parts] == [2 * BLOCK] * 2
    assert whole.num_tokens == len(PROMPT)
    for part in parts:
        worker.check(part.kv_handle, 2)
    worker.check(whole, 6)
    assert worker.leases.num_digested == 6
    worker.end_leases()


def test_cached_blocks_are_part_of_the_first() -> None:
    worker = PrefillWorker()
    worker.finish(worker.submit(PROMPT))
    longer = [*PROMPT[: 4 * BLOCK], *range(100, 100 + 3 * BLOCK)]
    parts, whole = worker.finish(worker.submit(longer))
    assert [len(part.block_keys) for part in parts] == [6]  # four of them cached
    worker.check(parts[0].kv_handle, 6)
    worker.check(whole, 7)
    worker.end_leases()


@pytest.mark.parametrize(("prompt", "in_parts"), [(PROMPT, False), (PROMPT[: 2 * BLOCK], True)], ids=["off", "short"])
def test_what_is_leased_only_as_a_whole(prompt: list[int], in_parts: bool) -> None:
    worker = PrefillWorker(in_parts)
    parts, whole = worker.finish(worker.submit(prompt))
    assert parts == []
    worker.check(whole, -(-len(prompt) // BLOCK))
    worker.end_leases()


def test_a_preempted_prompt_has_the_digests_of_its_new_blocks() -> None:
    worker = PrefillWorker()
    request = worker.submit(PROMPT, priority=1)
    parts, _ = worker.step(request)
    assert len(parts) == 1
    urgent = worker.submit(list(range(200, 200 + 13 * BLOCK)))  # its blocks and the leased ones leave one
    worker.step(request)
    assert request.num_preemptions == 1
    worker.check(parts[0].kv_handle, 2)  # stays valid
    worker.finish(urgent)
    worker.leases.expire(1000.0)
    worker.write_blocks(seed=1)  # computed again, among other rows
    parts, whole = worker.finish(request)
    assert parts == []
    worker.check(whole, 6)
    worker.end_leases()


def test_a_cancelled_prompt_leaves_its_leases() -> None:
    worker = PrefillWorker()
    request = worker.submit(PROMPT)
    assert len(worker.step(request)[0]) == 1
    del worker.open[request.request_id]
    worker.engine.abort(request.request_id)
    assert worker.engine.kv.pool.num_used == 2
    worker.end_leases()
