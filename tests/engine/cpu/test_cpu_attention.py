"""The CPU backend against the plain one on random schedules: same outputs, same pool, whatever comes and goes."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cpu import attention as cpu_attention
from engine.cpu.attention import CpuAttention
from engine.cpu.batch import build_batch
from engine.cpu.pool_attention import PoolAttention
from engine.layers.attention import Attention
from engine.plan import ScheduledRow
from engine.request import RequestId, SamplingParams
from engine.request_states import RequestState
from kernels.cpu_attention import padded_len
from kvstore.handle.runs import runs_of
from kvstore.types import BlockId

NUM_LAYERS, NUM_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 2, 8, 4, 400

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")


@dataclass(slots=True, eq=False)
class Tracked(RequestState):
    """With what a scheduler would know of it."""

    num_computed_tokens: int = 0


Row = tuple[ScheduledRow, Tracked]
ROTARY = torch.randn(2048, 2, HEAD_DIM)


def block_of(layer: int) -> Attention:
    """What a backend reads of a layer's attention."""
    block = Attention.__new__(Attention)
    block.layer, block.num_heads, block.num_kv_heads, block.qk_norm = layer, NUM_HEADS, KV_HEADS, None
    return block


class Pair:
    """The same steps through both backends, each with a pool of its own."""

    def __init__(self) -> None:
        shape = (NUM_BLOCKS, NUM_LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.pools = [torch.full(shape, float("nan")) for _ in range(2)]
        self.cpu = CpuAttention(self.pools[0], NUM_HEADS, ROTARY)
        self.plain = PoolAttention(self.pools[1], ROTARY)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, rows: list[Row]) -> None:
        batch = build_batch([row for row, _ in rows], [request for _, request in rows], BLOCK_SIZE)
        inputs = torch.from_numpy(batch.inputs)
        prepared: list[tuple[Any, Any]] = [
            (backend, backend.plan(batch, inputs)) for backend in (self.cpu, self.plain)
        ]
        for layer in range(NUM_LAYERS):
            qkv = torch.randn(batch.num_tokens, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM, generator=self.generator)
            outputs: list[Tensor] = [
                backend.attend(block_of(layer), qkv.clone(), metadata) for backend, metadata in prepared
            ]
            torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(self.pools[0], self.pools[1], equal_nan=True, atol=0, rtol=0)


class Sequences:
    """Requests with random blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.count = 0

    def new(self) -> Tracked:
        self.count += 1
        return Tracked(RequestId(f"r{self.count}"), [0] * 1002, 2, SamplingParams())  # single tokens are decode rows

    def row(self, request: Tracked, count: int, num_drafts: int = 0) -> Row:
        stop = request.num_computed_tokens + count + num_drafts
        while len(request.block_ids) * BLOCK_SIZE < stop:
            request.block_ids.append(BlockId(self.free.pop()))
        start, drafts = request.num_computed_tokens, (0,) * num_drafts
        row = ScheduledRow(request.request_id, start, count + num_drafts, False, draft_token_ids=drafts)
        request.num_computed_tokens = stop
        return row, request

    def release(self, request: Tracked) -> None:
        self.free += request.block_ids
        self.random.shuffle(self.free)
        request.block_ids, request.num_computed_tokens = [], 0


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_equal_the_plain_backend(seed: int) -> None:
    """Chunks, decode steps, drafts, pauses, preemptions, ends."""
    pair, sequences = Pair(), Sequences(seed)
    choose = sequences.random
    running = [sequences.new() for _ in range(3)]
    for _ in range(40):
        if choose.random() < 0.3 and len(running) < 9:
            running.append(sequences.new())
        rows = []
        for request in list(running):
            action = choose.random()
            if action < 0.04 or request.num_computed_tokens > 70:
                sequences.release(request)
                running.remove(request)
            elif action < 0.08:
                sequences.release(request)  # preempted: starts over with other blocks
            elif action < 0.15:
                continue  # sits this step out
            elif request.num_computed_tokens < 3 or action < 0.25:
                rows.append(sequences.row(request, choose.choice([2, 3, 9, 17])))
            elif action < 0.6:
                num_drafts = choose.randrange(1, 8)
                rows.append(sequences.row(request, 1, num_drafts))
                request.num_computed_tokens -= choose.randrange(num_drafts + 1)  # so many are not accepted
            else:
                rows.append(sequences.row(request, 1))
        choose.shuffle(rows)
        rows.sort(key=lambda pair: not pair[0].is_decode)
        if rows:
            pair.step(rows)


def test_long_chunks_are_cut_into_blocks_of_queries() -> None:
    pair, sequences = Pair(), Sequences(0)
    request = sequences.new()
    for count in (300, 131, 1, 128):
        pair.step([sequences.row(request, count)])


@pytest.mark.parametrize("min_run", [0, 1, 1000])
def test_blocks_are_read_in_runs_or_one_by_one(min_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs, all single blocks, and neither: a prefix, blocks from elsewhere, a last one that is not full."""
    monkeypatch.setattr(cpu_attention, "MIN_RUN", min_run)
    pair, sequences = Pair(), Sequences(0)
    request = sequences.new()
    blocks = [*range(10, 30), *range(90, 70, -3), *range(200, 230)]
    sequences.free = blocks[::-1]
    pair.step([sequences.row(request, 61)])
    pair.step([sequences.row(request, 90), sequences.row(other := sequences.new(), 6)])
    assert next(runs_of(request.block_ids)) == (0, 10, 20)
    assert other.block_ids[0] == request.block_ids[-1] + 1


def test_what_one_sequence_left_behind_does_not_reach_the_next() -> None:
    """A sequence with NaN in its KV, then another one in the same step."""
    pair, sequences = Pair(), Sequences(2)
    broken = sequences.new()
    broken.block_ids, broken.num_computed_tokens = [BlockId(sequences.free.pop()) for _ in range(4)], 10
    for pool in pair.pools:
        pool[broken.block_ids] = float("nan")
    row, request = sequences.row(broken, 1)
    batch = build_batch([row], [request], BLOCK_SIZE)
    metadata = pair.cpu.plan(batch, torch.from_numpy(batch.inputs))
    qkv = torch.zeros(1, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM)
    assert bool(pair.cpu.attend(block_of(0), qkv, metadata).isnan().all())
    pair.pools[1].copy_(pair.pools[0])
    healthy = sequences.new()
    pair.step([sequences.row(healthy, 3)])
    pair.step([sequences.row(healthy, 1)])


def test_padded_lengths_are_few() -> None:
    lengths = {padded_len(num_keys) for num_keys in range(1, 8193)}
    assert len(lengths) < 50
    assert all(padded_len(num_keys) >= num_keys for num_keys in range(1, 8193))
