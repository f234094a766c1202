"""Worker processes, and streams to them like a router's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc

from common.net.rpc import open_channel
from common.token_ids import pack_ids
from kvstore.handle.handle import PeerLease, open_handle
from protos import decode_pb2_grpc, prefill_pb2_grpc
from protos import types_pb2 as pb
from tests.harness.cluster import Service, free_ports, service_environment
from tests.kvstore.helpers import as_handle, with_address

PROMPT = list(b"A prompt of several blocks, so that there is something to pull. " * 3)
# Leases last a minute, so a lease that ends earlier was released.
DRY_RUN = ("--model=dry-run", "--num-gpu-blocks=256", "--num-threads=1", "--kv-lease-seconds=60")
# One request at a time, and at least 20 ms a step on any machine, so that requests stay open long enough for a test.
SLOW = (*DRY_RUN, "--simulated-steps=base=0.02", "--max-num-seqs=1")
MINUTE_LONG = pb.SamplingParams(max_tokens=3000)


class Worker:
    """One worker process."""

    def __init__(
        self, role: str, folder: Path, *flags: str, engine: Sequence[str] = DRY_RUN, program: Sequence[str] = ()
    ) -> None:
        """folder: for sockets and the log. program: see `Service`."""
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        [port] = free_ports(1)
        argv = [f"{role}_service", f"--port={port}", f"--worker-id={role}", f"--run-dir={folder}", *engine, *flags]
        self.service = Service(role, argv, folder / f"{role}.log", program)
        self.role = role
        self.address = f"127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self.service.start(service_environment())

    def stub(self, channel: grpc.aio.Channel) -> Any:
        kind = prefill_pb2_grpc.PrefillStub if self.role == "prefill" else decode_pb2_grpc.DecodeStub
        return kind(channel)

    async def wait_ready(self) -> None:
        async with open_channel(self.address) as channel:
            deadline = time.monotonic() + 120
            while True:
                try:
                    await self.stub(channel).Describe(pb.DescribeRequest(), timeout=5)
                    return
                except grpc.aio.AioRpcError:
                    if time.monotonic() > deadline or not self.service.is_alive():
                        raise AssertionError(self.service.log()) from None
                    await asyncio.sleep(0.02)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.service.wait, 60)


class Stream:
    """A router's end of Attach, with the worker's load and keys as of the last report."""

    def __init__(self, call: Any, keeps: bool) -> None:
        """keeps: the default of `keep` in Submits."""
        self._call = call
        self._keeps = keeps
        self.load = pb.LoadReport()
        self.keys: set[bytes] = set()
        self.cancelled: set[str] = set()  # their handles are released, as by a router

    async def submit(self, name: str, **fields: Any) -> None:
        sampling = pb.SamplingParams(max_tokens=16, ignore_eos=True, top_p=1.0, repetition_penalty=1.0)
        sampling.MergeFrom(fields.pop("sampling", pb.SamplingParams()))
        prompt = pack_ids(fields.pop("prompt_token_ids", PROMPT))
        fields = {"keep": self._keeps, **fields}
        submit = pb.Submit(request_id=name, sampling=sampling, prompt_token_ids=prompt, **fields)
        await self._call.write(pb.Command(submit=submit))

    async def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        await self._call.write(pb.Command(cancel=pb.Cancel(request_id=name)))

    async def hand_over(self, name: str) -> None:
        await self._call.write(pb.Command(hand_over=pb.HandOver(request_id=name)))

    async def release(self, lease_id: str, epoch: int) -> None:
        await self._call.write(pb.Command(release=pb.Release(lease_id=lease_id, epoch=epoch)))

    async def report(self) -> pb.StepReport:
        report = await self._next()
        assert report is not None, "the stream has ended"
        given = [(delta.request_id, delta.kv_handle) for delta in report.deltas if delta.HasField("kv_handle")]
        given += [(offer.request_id, offer.kv_handle) for offer in report.kv_offers]
        for name, handle in given:  # a request may end before its Cancel arrives
            if name in self.cancelled:
                await self.release(handle.lease_id, handle.epoch)
        return report

    async def _next(self) -> pb.StepReport | None:
        report = await asyncio.wait_for(self._call.read(), 60)
        if not isinstance(report, pb.StepReport):
            return None
        self.load = report.load
        for event in report.kv_events:
            if event.HasField("snapshot"):
                self.keys = set(event.snapshot.keys)
            self.keys |= set(event.stored.keys)
            self.keys -= set(event.removed.keys)
        return report

    async def deltas_of(self, name: str) -> list[pb.TokenDelta]:
        """Return all further deltas of a request."""
        deltas: list[pb.TokenDelta] = []
        while not deltas or not deltas[-1].finish_reason:
            report = await self.report()
            assert not [f for f in report.failures if f.request_id == name], report.failures
            deltas += [delta for delta in report.deltas if delta.request_id == name]
        return deltas

    async def until_end(self, name: str) -> tuple[list[int], pb.TokenDelta]:
        """Return a request's further tokens and its last delta."""
        deltas = await self.deltas_of(name)
        return tokens_of(deltas), deltas[-1]

    async def failure_of(self, name: str) -> pb.Failure:
        while True:
            for failure in (await self.report()).failures:
                if failure.request_id == name:
                    return failure

    async def until_broken(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self._next() is not None:
                pass

    async def until_quiet(self) -> pb.LoadReport:
        """Wait until nothing is open and every block is free or cached."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            load = (await self.report()).load
            in_steps = load.num_running + load.num_waiting + load.num_loading + load.num_swapped
            num_open = in_steps + load.num_leases
            if num_open == 0 and load.kv_blocks_free + load.kv_blocks_cached == load.kv_blocks_total:
                return load
        raise AssertionError(f"not quiet: {self.load}")


def tokens_of(deltas: Sequence[pb.TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@asynccontextmanager
async def attached(worker: Worker) -> AsyncIterator[Stream]:
    async with open_channel(worker.address) as channel:
        call = worker.stub(channel).Attach()
        yield Stream(call, keeps=worker.role == "decode")
        call.cancel()


async def prefill(stream: Stream, name: str, **fields: Any) -> tuple[list[int], pb.KvHandle]:
    await stream.submit(name, keep=False, **fields)
    tokens, delta = await stream.until_end(name)
    assert delta.finish_reason == pb.FINISH_REASON_PREFILLED
    return tokens, delta.kv_handle


def edited(handle: pb.KvHandle, edit: Callable[[PeerLease], PeerLease]) -> pb.KvHandle:
    """Return the handle with edited content."""
    return as_handle(edit(open_handle(handle)))


def by_tcp(handle: pb.KvHandle) -> pb.KvHandle:
    """Return the handle without the address for shared memory, so that only TCP can read it."""
    return edited(handle, lambda lease: with_address(lease, shm=None))


async def disaggregated(
    p: Stream, d: Stream, name: str, transport: str = "shm", **fields: Any
) -> tuple[list[int], pb.RequestTimes]:
    """Return a request's tokens and the decode worker's times. Waits until both workers are quiet."""
    first, handle = await prefill(p, name, **fields)
    handle = by_tcp(handle) if transport == "tcp" else handle
    await d.submit(name, output_token_ids=first, kv_handle=handle, keep=True, **fields)
    deltas = await d.deltas_of(name)
    await p.until_quiet()
    await d.until_quiet()
    return first + tokens_of(deltas), deltas[0].times


@contextmanager
def running(*workers: Worker) -> Iterator[dict[str, Worker]]:
    """Wait until all workers answer; yield them by role; kill them at the end."""
    try:
        for worker in workers:
            asyncio.run(worker.wait_ready())
        yield {worker.role: worker for worker in workers}
    finally:
        for worker in workers:
            worker.service.kill()


@contextmanager
def prefill_and_decode(folder: Path, engine: Sequence[str] = DRY_RUN) -> Iterator[dict[str, Worker]]:
    """Run one worker of each role, with sockets and logs in `folder`."""
    with running(*(Worker(role, folder, engine=engine) for role in ("prefill", "decode"))) as workers:
        yield workers
