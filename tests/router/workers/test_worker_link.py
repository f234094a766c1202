"""The link between router and worker: broken, silent, slow, or carrying nonsense. Streams go on or end in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from common.wings import has_wing
from protos import types_pb2 as pb
from tests.harness.router import Cluster, cluster, text_of
from tests.harness.scripted_worker import Script

SLOW = Script(delay_seconds=0.01)


class Link:
    """A TCP proxy in front of one worker."""

    def __init__(self, target_port: int) -> None:
        self.delay_seconds = 0.0
        self.num_bytes = 0
        self.passes = asyncio.Event()
        self.passes.set()
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def break_all(self) -> int:
        """Reset every connection; return their number."""
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = await asyncio.open_connection("127.0.0.1", self._target_port)
        for source, sink in ((reader, target[1]), (target[0], writer)):
            self._writers.add(sink)
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self.passes.wait()
                await asyncio.sleep(self.delay_seconds)
                self.num_bytes += len(data)
                sink.write(data)
        sink.transport.abort()
        self._writers.discard(sink)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.break_all()


@contextlib.asynccontextmanager
async def behind_a_link(script: Script, **config: Any) -> AsyncIterator[tuple[Cluster, Link]]:
    """Start a router that reaches decode worker d0 over a Link; it does not know d1 yet."""
    async with cluster(num_decode=2, script=script) as hidden:
        link = Link(hidden.decode[0].port)
        server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
        link.port = server.sockets[0].getsockname()[1]
        try:
            async with cluster(num_decode=0, decode=f"127.0.0.1:{link.port}", wait=False, **config) as c:
                c.decode = hidden.decode
                await c.until(lambda: len(c.model.workers.usable("decode")) == 1)
                yield c, link
                c.decode = []
        finally:
            server.close()
            await link.close()


async def undisturbed(max_tokens: int = 60) -> str:
    async with cluster() as c:
        return text_of(await c.events(max_tokens=max_tokens))


@pytest.mark.parametrize("fault", ["reset", pytest.param("black hole", marks=pytest.mark.wing("router.hangs"))])
async def test_a_stream_goes_on_when_its_link_fails(fault: str) -> None:
    control = await undisturbed(400)
    patience = {"worker_timeout_seconds": 1.0} if fault == "black hole" else {}
    async with behind_a_link(SLOW, **patience) as (c, link):
        stream = asyncio.create_task(c.events(max_tokens=400))  # four seconds
        await c.until(lambda: c.decode[0].num_tokens > 5)
        c.gateway.workers._add("decode", c.decode[1].address)
        await c.until(lambda: len(c.model.workers.usable("decode")) == 2)
        assert not stream.done()
        c.decode[1].script.delay_seconds = 0.0
        if fault == "reset":
            assert link.break_all() > 0
        else:
            link.passes.clear()
        events = await stream
        assert c.decode[1].submits[0].output_token_ids  # it came here in the middle
        assert text_of(events) == control
        assert events.count("[DONE]") == 1
        link.passes.set()
        await c.until(lambda: len(c.model.workers.usable("decode")) == 2)
        await c.until(lambda: not any(session.running for session in c.decode[0].sessions))  # nothing is left there


async def test_a_slow_link_is_not_a_dead_one() -> None:
    control = await undisturbed()
    async with behind_a_link(SLOW) as (c, link):
        link.delay_seconds = 0.2
        before = link.num_bytes
        assert text_of(await c.events(max_tokens=60)) == control
        assert link.num_bytes > before
        assert c.gateway.workers.links[0].num_lost == 0


@pytest.mark.wing("router.hangs")
async def test_an_idle_worker_that_answers_health_checks_is_not_silent() -> None:
    async with cluster(worker_timeout_seconds=0.5) as c:
        [link] = c.gateway.workers.links
        for _ in range(20):  # a busy machine may be silent itself
            before = link.num_lost
            await asyncio.sleep(0.8)
            if link.num_lost == before:
                return
        pytest.fail("the worker was lost again and again")


async def test_an_address_where_something_else_answers_is_tried_again() -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        with contextlib.suppress(ConnectionError):
            writer.write(b"220 mail.example.com ESMTP\r\n" + bytes(range(256)) * 64)
            await writer.drain()
        writer.close()

    asked = asyncio.Event()
    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with server, cluster() as c:
        c.gateway.workers._add("decode", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await asyncio.wait_for(asked.wait(), 60)
        asked.clear()
        assert (await c.chat()).status_code == 200
        await asyncio.wait_for(asked.wait(), 60)
        assert [link.state(0.0) for link in c.gateway.workers.links] == ["ready", "connecting"]


def unknown_request(report: pb.StepReport) -> None:
    report.deltas.add(request_id="nobody", token_ids=[1], finish_reason=pb.FINISH_REASON_STOP)
    report.failures.add(request_id="nobody", code=pb.FAILURE_CODE_INTERNAL)


def twice(report: pb.StepReport) -> None:
    """Report the end of a request twice, with tokens after it."""
    for delta in list(report.deltas):
        if delta.finish_reason:
            report.deltas.add().CopyFrom(delta)
            report.deltas.add(request_id=delta.request_id, token_ids=[65])


def odd_events(report: pb.StepReport) -> None:
    report.kv_events.add(sequence=(1 << 64) - 1, stored=pb.BlockKeys(keys=[b"", b"short", b"x" * 1000]))
    report.kv_events.add(sequence=0, removed=pb.BlockKeys(keys=[b"never seen"]))
    report.kv_events.add(sequence=5)


def odd_load(report: pb.StepReport) -> None:
    report.load.kv_blocks_free = (1 << 32) - 1
    report.load.step_seconds = float("nan")
    report.load.num_waiting = (1 << 32) - 1
    report.load.waiting_prefill_tokens = (1 << 32) - 1


def odd_times(report: pb.StepReport) -> None:
    for delta in report.deltas:
        delta.times.prefill_seconds = float("nan")
        delta.times.queue_seconds = float("-inf")
        delta.times.kv_pull_seconds = -1.0
        delta.times.num_cached_tokens = (1 << 32) - 1
        delta.times.num_pulled_tokens = 7


def empty_deltas(report: pb.StepReport) -> None:
    for delta in list(report.deltas):
        report.deltas.insert(0, pb.TokenDelta(request_id=delta.request_id))


def huge_ids(report: pb.StepReport) -> None:
    for delta in report.deltas:
        delta.token_ids[:] = [(1 << 32) - 1] * len(delta.token_ids)


def odd_logprobs(report: pb.StepReport) -> None:
    for delta in report.deltas:
        for entry in delta.logprobs:
            entry.logprob = float("nan")
            entry.top_logprobs[:] = [float("inf")]
            entry.token_id = (1 << 32) - 1


def no_logprobs(report: pb.StepReport) -> None:
    for delta in report.deltas:
        del delta.logprobs[:]


def odd_end(report: pb.StepReport) -> None:
    for delta in report.deltas:
        delta.finish_reason = 77  # type: ignore[assignment]


def cancelled(report: pb.StepReport) -> None:
    for delta in report.deltas:
        delta.finish_reason = pb.FINISH_REASON_CANCELLED


def prefilled(report: pb.StepReport) -> None:
    for delta in report.deltas:
        delta.finish_reason = pb.FINISH_REASON_PREFILLED


HARMLESS = [unknown_request, twice, odd_events, odd_load, odd_times, empty_deltas]
HARMFUL = [huge_ids, odd_logprobs, no_logprobs, odd_end, cancelled, prefilled]
WITH_LOGPROBS = [empty_deltas, odd_logprobs, no_logprobs]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(spoil, marks=[pytest.mark.wing("router.answer_details")] if spoil in WITH_LOGPROBS else [])
        for spoil in (*HARMLESS, *HARMFUL)
    ],
    ids=lambda spoil: str(spoil.__name__),
)
async def test_nonsense_from_a_worker_harms_its_request_at_most(spoil: Callable[[pb.StepReport], None]) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if spoil in WITH_LOGPROBS else {}
    async with cluster() as c:
        control = (await c.chat(**fields)).json()
        c.decode[0].script.spoil = spoil
        answer = await c.chat(**fields)
        events = await asyncio.wait_for(
            c.events(**fields) if answer.status_code == 200 else c.chat(stream=True, **fields), 60
        )
        if spoil in HARMLESS:
            assert answer.json()["choices"] == control["choices"]
            assert isinstance(events, list)
            assert events.count("[DONE]") == 1
        elif answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.status_code in (500, 503)
        c.decode[0].script.spoil = None
        await c.until(lambda: bool(c.model.workers.usable("decode")))
        assert (await c.chat(**fields)).json()["choices"] == control["choices"]
        await c.until(c.is_quiet)
        if has_wing("router.cluster_state"):
            assert (await c.http.get("/v1/cluster")).status_code == 200
        assert (await c.http.get("/metrics")).status_code == 200


async def test_a_jump_of_the_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    control = await undisturbed()
    async with cluster(script=SLOW, request_timeout_seconds=120.0) as c:
        now = time.time
        stream = asyncio.create_task(c.events(max_tokens=60))
        await c.until(lambda: c.decode[0].num_tokens > 5)
        monkeypatch.setattr(time, "time", lambda: now() + 10**8)
        assert (await c.chat()).json()["created"] > now() + 10**7  # it has jumped
        monkeypatch.setattr(time, "time", lambda: now() - 10**8)
        assert (await c.chat()).status_code == 200
        assert text_of(await stream) == control
        assert c.gateway.workers.links[0].num_lost == 0
