"""Prefill and decode workers as real processes, driven over gRPC as a router drives them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.net.rpc import open_channel, token_metadata
from kvstore.handle.handle import PeerLease
from mini_infer import LLM, SamplingParams
from protos import kvstore_pb2, kvstore_pb2_grpc
from protos import types_pb2 as pb
from tests.harness.cluster import Service, service_environment
from tests.harness.processes import children, until_gone
from tests.harness.waiting import until
from tests.harness.worker import PROMPT, Worker, attached, disaggregated, edited, prefill
from tests.kvstore.helpers import with_shard


@pytest.fixture(scope="module")
def expected() -> list[int]:
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1)
    return llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize(
    ("computes", "generates", "transport"),
    [("prefill", "decode", "shm"), ("prefill", "decode", "tcp"), ("decode", "prefill", "shm")],
)
async def test_disaggregated_equals_one_engine(
    workers: dict[str, Worker], expected: list[int], computes: str, generates: str, transport: str
) -> None:
    salt = f"{computes} {transport}"  # a cache of its own, so that there is something to pull
    async with attached(workers[computes]) as p, attached(workers[generates]) as d:
        tokens, times = await disaggregated(p, d, "d", transport, cache_salt=salt)
        assert tokens == expected
        assert (times.transport, times.kv_pull_failed, times.num_pulled_tokens) == (transport, False, len(PROMPT))


def corrupt(handle: pb.KvHandle) -> None:
    handle.CopyFrom(edited(handle, with_a_wrong_digest))


def with_a_wrong_digest(lease: PeerLease) -> PeerLease:
    digests = list(lease.shards[0].digests)
    digests[1] ^= 1
    return with_shard(lease, digests=tuple(digests))


def make_stale(handle: pb.KvHandle) -> None:
    handle.epoch += 1


def make_of_other_tokens(handle: pb.KvHandle) -> None:
    handle.num_tokens -= 1


@pytest.mark.parametrize("spoil", [corrupt, make_stale, make_of_other_tokens])
async def test_kv_that_is_not_what_it_should_be_is_recomputed(
    workers: dict[str, Worker], expected: list[int], spoil: Callable[[pb.KvHandle], None]
) -> None:
    name = spoil.__name__
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        first, handle = await prefill(p, name, cache_salt=name)
        epoch = handle.epoch
        spoil(handle)
        await d.submit(name, cache_salt=name, output_token_ids=first, kv_handle=handle)
        tokens, _ = await d.until_end(name)
        assert first + tokens == expected
        if handle.epoch != epoch:  # its reader cannot release it
            await p.release(handle.lease_id, epoch)
        await p.until_quiet()


async def test_events_name_the_blocks(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p:
        await p.report()
        before = set(p.keys)
        _, handle = await prefill(p, "events", cache_salt="events")
        assert len(p.keys - before) == len(PROMPT) // 16
        async with attached(workers["prefill"]) as other:
            await other.report()
            assert other.keys == p.keys  # a newcomer starts with the whole set
        await p.release(handle.lease_id, handle.epoch)
        await p.until_quiet()


async def test_bad_submits_fail_alone(workers: dict[str, Worker], expected: list[int]) -> None:
    async with attached(workers["decode"]) as d:
        await d.submit("empty", prompt_token_ids=[])
        failure = await d.failure_of("empty")
        assert (failure.code, failure.param) == (pb.FAILURE_CODE_INVALID_ARGUMENT, "prompt")
        await d.submit("vocab", prompt_token_ids=[10**6])
        assert "vocabulary" in (await d.failure_of("vocab")).message
        await d.submit("hot", sampling=pb.SamplingParams(temperature=-1.0))
        assert (await d.failure_of("hot")).param == "temperature"
        await d.submit("long", prompt_token_ids=[65] * 5000)
        assert (await d.failure_of("long")).error_code == "context_length_exceeded"
        await d.submit("done", output_token_ids=[65] * 16)  # a router's mistake, so no field of a client's request
        failure = await d.failure_of("done")
        assert (failure.code, failure.param) == (pb.FAILURE_CODE_INVALID_ARGUMENT, "")
        await d.submit("poet", adapter="poet")
        failure = await d.failure_of("poet")
        assert (failure.code, failure.param) == (pb.FAILURE_CODE_INVALID_ARGUMENT, "model")
        assert failure.message == "the workers of this model serve no adapters (--enable-lora)"
        await d.submit("late", deadline_seconds=0.05, sampling=pb.SamplingParams(max_tokens=1800))
        assert (await d.failure_of("late")).code == pb.FAILURE_CODE_DEADLINE_EXCEEDED
        for number, bad in enumerate((pb.KvHandle(), pb.KvHandle(lease_id="x", shards=[b"\xc1 nonsense"]))):
            name = f"handle-{number}"
            await d.submit(name, cache_salt=name, output_token_ids=expected[:1], kv_handle=bad)
            assert (await d.until_end(name))[0] == expected[1:]
        await d.submit("good", cache_salt="good")
        assert (await d.until_end("good"))[0] == expected


async def test_random_bytes_on_the_port_harm_nothing(workers: dict[str, Worker], expected: list[int]) -> None:
    rng = random.Random(3)
    host, port = workers["decode"].address.split(":")
    for size in (1, 64, 4096, 200_000):
        with socket.create_connection((host, int(port)), timeout=60) as raw, contextlib.suppress(OSError):
            raw.sendall(rng.randbytes(size))
    async with attached(workers["decode"]) as d:
        await d.submit("after", cache_salt="after")
        assert (await d.until_end("after"))[0] == expected


async def test_a_cluster_token_is_demanded(tmp_path: Path) -> None:
    worker = Worker("prefill", tmp_path, "--cluster-token=right", "--host=0.0.0.0")
    try:
        await until(lambda: "ready on" in worker.service.log())
        async with open_channel(worker.address) as channel:
            for token, code in (("", "UNAUTHENTICATED"), ("wrong", "UNAUTHENTICATED"), ("right", "OK")):
                call = worker.stub(channel).Describe(pb.DescribeRequest(), timeout=30, metadata=token_metadata(token))
                assert (await call.code()).name == code
            kv = kvstore_pb2_grpc.KvTransferStub(channel)
            assert (await kv.Renew(kvstore_pb2.LeaseRequest(), timeout=60).code()).name == "UNAUTHENTICATED"
    finally:
        worker.service.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=/does/not/exist"], "not found"),
        (["--model=dry-run", "--host=0.0.0.0"], "--cluster-token"),
        (["--model=dry-run", "--num-gpu-blocks=1", "--block-size=16", "--kv-lease-seconds=0"], "kv-lease-seconds"),
        (["--model=dry-run", "--quant-mode=int8-weight", "--device=cuda"], "cuda"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    service = Service("decode", ["decode_service", f"--run-dir={tmp_path}", *arguments], tmp_path / "log")
    service.start(service_environment())
    assert service.wait(200.0) == 1
    errors = [line for line in service.log().splitlines() if line.startswith("decode: ")]
    assert len(errors) == 1, service.log()
    assert message in errors[0]
    assert "Traceback" not in service.log()


async def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    worker = Worker("decode", tmp_path, program=(sys.executable, "-m"))
    try:
        await until(lambda: children(worker.service.pid))  # the engine process, which imports torch
        worker.service.signal(signal.SIGTERM)
        assert await worker.exit_code() in (0, -signal.SIGTERM)
    finally:
        worker.service.kill()


async def test_a_dead_engine_ends_its_worker_and_a_dead_front_its_engine(tmp_path: Path) -> None:
    worker = Worker("decode", tmp_path)
    try:
        await worker.wait_ready()
        async with attached(worker) as d:
            await d.report()
            [engine] = children(worker.service.pid)
            os.kill(engine, signal.SIGKILL)
            await d.until_broken()
        assert await worker.exit_code() == 1
        worker.start()
        await worker.wait_ready()
        [engine] = children(worker.service.pid)
        worker.service.kill()
        await asyncio.to_thread(until_gone, engine)
    finally:
        worker.service.kill()
