"""Errors for clients when workers refuse, are away or slow, or when too many wait; and the choice of workers."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from common.wings import has_wing
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.config import RouterConfig
from router.dispatch import Roles
from router.http.answer import KEEP_ALIVE
from router.journal import Journal, Placement
from router.workers.model_workers import ModelWorkers
from tests.harness.router import cluster, sse_events, text_of
from tests.harness.scripted_worker import Script
from tests.router.pushed import Worker

PROMPT = list(range(33))  # two blocks and one token
SLOW = Script(delay_seconds=0.01)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (pb.FAILURE_CODE_INTERNAL, 500),
        (pb.FAILURE_CODE_INVALID_ARGUMENT, 500),  # names no field: not the client's mistake
        (pb.FAILURE_CODE_FAILED_PRECONDITION, 500),
        (99, 500),  # of a newer worker
        (pb.FAILURE_CODE_RESOURCE_EXHAUSTED, 429),
        (pb.FAILURE_CODE_UNAVAILABLE, 503),
        (pb.FAILURE_CODE_DEADLINE_EXCEEDED, 504),
    ],
)
async def test_failures_become_http_errors(code: int, status: int) -> None:
    async with cluster(script=Script(refuse=code)) as c:
        answer = await c.chat()
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        c.decode[0].script.refuse = None
        assert (await c.chat()).status_code == 200
        await c.until(c.is_quiet)


async def test_a_failure_that_names_a_field_is_the_clients() -> None:
    script = Script(refuse=pb.FAILURE_CODE_INVALID_ARGUMENT, refuse_param="temperature")
    async with cluster(num_prefill=1, local_prefill_tokens=0, script=script) as c:
        answer = await c.chat()
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "refused by script", "type": "invalid_request_error", "param": "temperature",
            "code": "made_up",
        }  # fmt: skip
        assert len(c.prefill[0].submits) == 1  # nobody else is asked


async def test_a_mistake_between_router_and_worker_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(script=Script(refuse=pb.FAILURE_CODE_INVALID_ARGUMENT)) as c:
        answer = await c.chat()
        assert answer.status_code == 500
        assert "script" not in answer.text
        request_id = c.decode[0].submits[0].request_id
        assert f"a worker refused {request_id} as FAILURE_CODE_INVALID_ARGUMENT: refused by script" in caplog.text


async def test_a_worker_that_stays_away_ends_its_streams_with_an_error_event() -> None:
    async with cluster(script=SLOW, worker_wait_seconds=0.3) as c:  # nothing else is waited for: the deadline is far
        request = asyncio.create_task(c.events(max_tokens=200))
        await c.until(lambda: c.decode[0].num_tokens >= 5)
        await c.decode[0].kill()
        events = await request
        assert events[-2]["error"]["type"] == "service_unavailable_error"
        assert events[-1] == "[DONE]"
        refused = await c.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert c.is_quiet()


async def test_a_stream_that_waits_for_its_only_worker_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.answer.KEEP_ALIVE_SECONDS", 0.05)
    async with cluster(script=SLOW) as c:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "seed": 1, "stream": True}
        async with c.http.stream("POST", "/v1/chat/completions", json=body) as response:
            data = response.aiter_bytes()
            raw = await anext(data)
            await c.decode[0].kill()
            await c.until(lambda: c.model.workers.usable("decode") == [])
            num_before = raw.count(KEEP_ALIVE)  # a busy machine may be slower than the worker
            while raw.count(KEEP_ALIVE) < num_before + 2:
                raw += await anext(data)
            await c.decode[0].start()
            async for more in data:
                raw += more
        events = [event async for event in sse_events(httpx.Response(200, content=raw.replace(KEEP_ALIVE, b"")))]
        assert len(text_of(events)) == 60
        await c.until(c.is_quiet)


async def test_a_full_queue_refuses_and_says_how_long_it_takes_at_the_rate_that_was_measured() -> None:
    async with cluster(script=Script(is_silent=True), max_queue=4) as c:
        for seconds in (1.0, 0.0):
            waiting = [asyncio.create_task(c.chat()) for _ in range(4)]
            await c.until(lambda: c.model.dispatcher.num_waiting == 4)
            await asyncio.sleep(seconds)
            refused = await c.chat()
            assert c.model.dispatcher.num_waiting == 4  # nothing had to end first
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
            c.decode[0].speak()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4
            c.decode[0].script.is_silent = True
        if has_wing("router.costs"):
            assert int(refused.headers["retry-after"]) >= 2  # the first four took more than a second


class Placer:
    """Chooses among two workers of each role, without predictions."""

    def __init__(self, local_prefill_tokens: int = 0) -> None:
        self.workers = ModelWorkers("dry-run", "dry-run", "")
        config = RouterConfig(decode="127.0.0.1:1", local_prefill_tokens=local_prefill_tokens)
        self.roles = Roles(config, self.workers)
        self.prefill = [Worker(self.workers, "prefill", name) for name in ("p0", "p1")]
        self.decode = [Worker(self.workers, "decode", name) for name in ("d0", "d1")]

    def place(self, has_prefill: bool = True) -> Placement:
        journal = Journal("r1-0", PROMPT, pb.SamplingParams(), deadline=1.0, arrival=0.0)
        prefill = [worker.link for worker in self.prefill] if has_prefill else []
        return self.roles.choose(journal, prefill, [worker.link for worker in self.decode])

    def cache(self, worker: Worker, num_blocks: int) -> None:
        journal = Journal("r1-0", PROMPT, pb.SamplingParams(), deadline=1.0, arrival=0.0)
        keys = block_keys(root_key(worker.info.model_fingerprint), journal.packed_prompt, worker.info.block_size)
        self.workers.index.snapshot(WorkerId(worker.info.worker_id), 1, keys[:num_blocks])


def busy(worker: Worker, num_running: int = 1) -> None:
    worker.link.apply(pb.StepReport(load=pb.LoadReport(num_running=num_running, num_steps=1)))


def test_the_least_loaded_workers_serve() -> None:
    placer = Placer()
    busy(placer.prefill[0])
    busy(placer.decode[1])
    assert placer.place() == Placement(WorkerId("d0"), WorkerId("p1"), 0)
    assert placer.place().kind == "disaggregated"


def test_of_equally_loaded_workers_those_that_have_the_prompt_serve() -> None:
    placer = Placer()
    placer.cache(placer.prefill[1], 2)
    placer.cache(placer.decode[0], 1)
    for _ in range(8):
        assert placer.place() == Placement(WorkerId("d0"), WorkerId("p1"), 32)
    busy(placer.decode[0])
    assert placer.place() == Placement(WorkerId("d1"), WorkerId("p1"), 32)


def test_a_short_rest_is_computed_where_it_is_decoded() -> None:
    placer = Placer(local_prefill_tokens=1)
    placer.cache(placer.decode[1], 2)
    busy(placer.decode[0])
    assert placer.place() == Placement(WorkerId("d1"), None, 32)
    assert placer.place().kind == "local"


def test_without_a_prefill_worker_every_prompt_is_computed_where_it_is_decoded() -> None:
    placer = Placer()
    busy(placer.decode[0], 2)
    busy(placer.decode[1], 1)
    assert placer.place(has_prefill=False) == Placement(WorkerId("d1"), None, 0)
