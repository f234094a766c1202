"""What happens to requests when workers die, refuse, hang or are too busy, and when clients leave."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos import types_pb2 as pb
from router.http import sse
from tests.harness.router import Cluster, cluster, sse_events, text_of
from tests.harness.scripted_worker import Script, ScriptedWorker

SLOW = Script(delay_seconds=0.01)


def owner(c: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    """(the decode worker that has the request, the other one)"""
    first, second = c.decode
    return (first, second) if any(s.running for s in first.sessions) else (second, first)


async def undisturbed(**fields: Any) -> dict[str, Any]:
    """The same request on a cluster in which nothing happens."""
    async with cluster() as c:
        answer = (await c.chat(**{"max_tokens": 40, **fields})).json()
    assert "error" not in answer
    return answer


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}], ids=str)
async def test_a_killed_decode_worker_loses_and_repeats_nothing(fields: dict[str, Any]) -> None:
    control = await undisturbed(**fields)
    async with cluster(num_decode=2, script=SLOW) as c:
        request = asyncio.create_task(c.chat(max_tokens=40, **fields))
        await c.until(lambda: sum(worker.num_tokens for worker in c.decode) >= 10)
        victim, survivor = owner(c)
        await victim.kill()
        answer = (await request).json()
        resumed = [submit for submit in survivor.submits if submit.output_token_ids]
        assert resumed  # the fault happened in the middle
        assert all(submit.sampling.max_tokens == 40 for submit in resumed)
        assert answer["choices"] == control["choices"]
        assert answer["usage"] == control["usage"]
        await c.until(c.is_quiet)
        assert 'mini_infer_migrations_total{model_name="dry-run"} 0.0' not in (await c.http.get("/metrics")).text


async def test_a_stream_goes_on_when_its_worker_breaks_it_off() -> None:
    control = await undisturbed(stop=["zq"])
    async with cluster(num_decode=2, script=Script(delay_seconds=0.002, die_after_tokens=15)) as c:
        c.decode[1].script.die_after_tokens = -1
        c.decode[1].script.delay_seconds = 0.002
        for _ in range(60):
            events = await c.events(max_tokens=40, stop=["zq"])
            assert text_of(events) == control["choices"][0]["message"]["content"]
            assert sum(bool(e["choices"][0]["finish_reason"]) for e in events[:-1]) == 1
            assert events.count("[DONE]") == 1
            if c.decode[0].script.die_after_tokens == -1:  # the request had gone to the one that dies
                break
        else:
            pytest.fail("no request went to the worker that dies")
        await c.until(c.is_quiet)


@pytest.mark.parametrize(
    ("text", "stop", "num_before", "shown"),
    [
        ("one two three four", "thr", 9, "one two "),  # dies between "t" and "hr"
        ("one two three four", "!", 9, "one two three four"),
        ("a 😀 b", "zz", 3, "a 😀 b"),  # in the middle of a character
        ("漢字", "字", 4, "漢"),
    ],
)
async def test_text_goes_on_across_a_migration(text: str, stop: str, num_before: int, shown: str) -> None:
    script = Script(reply=list(text.encode()), delay_seconds=0.005)
    async with cluster(num_decode=2, script=script) as c:
        for worker in c.decode:
            worker.script.die_after_tokens = num_before
        events = await c.events(max_tokens=40, stop=[stop])
        assert sum(bool(submit.output_token_ids) for worker in c.decode for submit in worker.submits) >= 1
        assert text_of(events) == shown
        assert [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"][0]["finish_reason"]] == ["stop"]
        await c.until(c.is_quiet)


async def test_a_killed_prefill_worker_is_replaced_by_another_or_by_local_prefill() -> None:
    control = await undisturbed()
    async with cluster(num_prefill=2, script=SLOW, local_prefill_tokens=0) as c:
        for worker in c.prefill:
            worker.script.is_silent = True
        for num_left in (1, 0):
            request = asyncio.create_task(c.chat(max_tokens=40))
            await c.until(lambda: any(s.running for worker in c.prefill for s in worker.sessions))
            victim = next(worker for worker in c.prefill if any(s.running for s in worker.sessions))
            for worker in c.prefill:
                worker.script.is_silent = worker is victim
            await victim.kill()
            answer = (await request).json()
            assert answer["choices"] == control["choices"]
            c.prefill = [worker for worker in c.prefill if worker is not victim]
            assert len(c.prefill) == num_left
            for worker in c.prefill:
                worker.script.is_silent = True
        await c.until(c.is_quiet)


@pytest.mark.parametrize("code", [pb.FAILURE_CODE_UNAVAILABLE, pb.FAILURE_CODE_RESOURCE_EXHAUSTED])
async def test_a_worker_that_refuses_is_passed_over(code: int) -> None:
    control = await undisturbed()
    async with cluster(num_decode=2) as c:
        c.decode[0].script.refuse = code
        for _ in range(100):  # equal workers are drawn: one of them may not be for a while
            assert (await c.chat(max_tokens=40)).json()["choices"] == control["choices"]
            if c.decode[0].submits:
                break
        assert c.decode[0].submits


async def test_a_decode_worker_that_refuses_leaves_the_kv_to_the_next_one() -> None:
    control = await undisturbed()
    async with cluster(num_prefill=1, num_decode=2, local_prefill_tokens=0) as c:
        c.decode[0].script.refuse = pb.FAILURE_CODE_UNAVAILABLE
        for _ in range(20):
            assert (await c.chat(max_tokens=40)).json()["choices"] == control["choices"]
            if c.decode[0].submits:
                break
        assert c.decode[0].submits  # it was asked, and refused
        assert c.decode[1].submits[-1].kv_handle == c.decode[0].submits[-1].kv_handle
        assert len(c.prefill[0].submits) == len(c.decode[1].submits)  # nothing was computed twice


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


async def test_a_stream_waits_for_its_only_worker_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    control = await undisturbed(max_tokens=60)
    async with cluster(script=SLOW) as c:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "seed": 1, "stream": True}
        raw = b""
        newcomer: asyncio.Task[httpx.Response] | None = None
        came_back, num_before = False, 0
        async with c.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for data in response.aiter_bytes():
                raw += data
                if newcomer is None and raw.count(b"data: ") > 5:
                    await c.decode[0].kill()
                    await c.until(lambda: c.model.workers.usable("decode") == [])
                    newcomer = asyncio.create_task(c.chat(max_tokens=4))  # waits, too
                    num_before = raw.count(sse.KEEP_ALIVE)  # a busy machine may be slower than the worker
                if newcomer is not None and raw.count(sse.KEEP_ALIVE) > num_before + 1 and not came_back:
                    assert c.model.workers.usable("decode") == []
                    assert not newcomer.done()
                    came_back = True
                    await c.decode[0].start()
        assert newcomer is not None
        events = [event async for event in sse_events(httpx.Response(200, content=raw.replace(sse.KEEP_ALIVE, b"")))]
        assert text_of(events) == control["choices"][0]["message"]["content"]
        assert (await newcomer).status_code == 200
        await c.until(c.is_quiet)


async def test_requests_that_are_in_prefill_count_where_they_will_decode() -> None:
    async with cluster(num_prefill=1, num_decode=2, local_prefill_tokens=0, script=Script(is_silent=True)) as c:
        answers = [asyncio.create_task(c.chat(f"prompt {number} " * 10)) for number in range(8)]
        await c.until(lambda: len(c.prefill[0].submits) == 8)
        assert not any(worker.submits for worker in c.decode)
        for worker in (*c.prefill, *c.decode):
            worker.speak()
        await asyncio.gather(*answers)
        assert sorted(len(worker.submits) for worker in c.decode) == [4, 4]
        assert all(link.view().load == 0 for link in c.gateway.workers.links)


async def test_a_worker_that_comes_back_is_used_again() -> None:
    async with cluster() as c:
        await c.decode[0].kill()
        await c.until(lambda: not c.model.workers.usable("decode"))
        assert (await c.http.get("/readyz")).status_code == 503
        assert (await c.http.get("/healthz")).status_code == 200
        await c.decode[0].start()
        await c.until(lambda: bool(c.model.workers.usable("decode")))
        assert (await c.chat()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_worker(stream: bool) -> None:
    async with cluster(script=SLOW) as c:
        request = asyncio.create_task(c.events(max_tokens=400) if stream else c.chat(max_tokens=400))
        await c.until(lambda: c.decode[0].num_tokens > 5)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await c.until(lambda: bool(c.decode[0].cancels))
        assert c.decode[0].num_tokens < 400
        await c.until(c.is_quiet)


async def test_the_deadline_holds_when_a_worker_never_answers() -> None:
    async with cluster(script=Script(is_silent=True), request_timeout_seconds=0.3) as c:
        answer = await c.chat()
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        await c.until(lambda: bool(c.decode[0].cancels))
        await c.until(c.is_quiet)


ENDLESS = Script(delay_seconds=0.005)
IN_TIME: dict[str, Any] = {"max_tokens": 100_000, "seed": 1}


async def test_at_the_deadline_an_answer_has_the_text_so_far() -> None:
    info = {"max_model_len": 1 << 20}
    async with cluster(script=ENDLESS, info=info, request_timeout_seconds=1.5) as c:
        answer = await c.chat(**IN_TIME, return_token_ids=True)
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
        assert len(choice["token_ids"]) == answer.json()["usage"]["completion_tokens"] > 0
        assert choice["message"]["content"] == c.tokenizer.decode(choice["token_ids"])
        await c.until(lambda: bool(c.decode[0].cancels))
        await c.until(c.is_quiet)
        metrics = (await c.http.get("/metrics")).text
        assert 'vllm:request_success_total{finished_reason="length",model_name="dry-run"} 1.0' in metrics


async def test_at_the_deadline_a_stream_ends_like_an_answer() -> None:
    info = {"max_model_len": 1 << 20}
    async with cluster(script=ENDLESS, info=info, request_timeout_seconds=1.5) as c:
        events = await c.events(**IN_TIME, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        ends = [e["choices"][0] for e in events[:-1] if e["choices"] and e["choices"][0]["finish_reason"]]
        assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [("length", "deadline")]
        assert len(text_of(events)) == events[-2]["usage"]["completion_tokens"] > 0
        await c.until(c.is_quiet)


async def test_too_many_waiting_requests_get_429_at_once() -> None:
    async with cluster(script=Script(is_silent=True), max_queue=3) as c:
        waiting = [asyncio.create_task(c.chat()) for _ in range(3)]
        await c.until(lambda: c.model.dispatcher.num_waiting == 3)
        refused = await c.chat()
        assert c.model.dispatcher.num_waiting == 3  # nothing had to end first
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        c.decode[0].speak()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3


async def test_a_full_queue_says_how_long_it_takes_at_the_rate_that_was_measured() -> None:
    async with cluster(script=Script(is_silent=True), max_queue=4) as c:
        for seconds in (1.0, 0.0):
            waiting = [asyncio.create_task(c.chat()) for _ in range(4)]
            await c.until(lambda: c.model.dispatcher.num_waiting == 4)
            await asyncio.sleep(seconds)
            refused = await c.chat()
            c.decode[0].speak()
            await asyncio.gather(*waiting)
            c.decode[0].script.is_silent = True
        assert int(refused.headers["retry-after"]) >= 2  # the first four took more than a second


async def test_many_requests_through_a_kill_equal_the_run_without_it() -> None:
    prompts = [f"prompt {number} " * (number % 5 + 1) for number in range(40)]

    async def run(c: Cluster, disturb: bool) -> list[str]:
        tasks = [asyncio.create_task(c.chat(p, max_tokens=20 + i % 30)) for i, p in enumerate(prompts)]
        if disturb:
            before = c.decode[0].num_tokens
            await c.until(lambda: c.decode[0].num_tokens > before + 100)
            assert any(session.running for session in c.decode[0].sessions)
            await c.decode[0].kill()
        return [(await task).json()["choices"][0]["message"]["content"] for task in tasks]

    async with cluster(num_prefill=1, num_decode=2, local_prefill_tokens=30, script=Script(delay_seconds=0.001)) as c:
        expected = await run(c, disturb=False)
        assert await run(c, disturb=True) == expected
        await c.until(c.is_quiet)


async def test_prefix_index_sends_a_repeated_prompt_to_the_cache() -> None:
    async with cluster(num_decode=3) as c:
        prompt = "a shared beginning that is long enough for several blocks " * 3
        await c.chat(prompt)
        first = next(worker for worker in c.decode if worker.submits)
        await c.until(lambda: c.model.workers.index.num_keys > 0)
        for _ in range(4):
            await c.chat(prompt)
        assert len(first.submits) == 5
        await c.chat(prompt, cache_salt="other tenant")  # nothing of it is shared
        shown = c.model.workers.cached_tokens(first.submits[0].prompt_token_ids, pb.Submit(cache_salt="third"))
        assert shown == {}


async def test_mismatched_worker_is_refused_with_what_differs() -> None:
    async with cluster(num_decode=1) as c:
        odd = await ScriptedWorker("decode", "odd", model_fingerprint="0" * 64).start()
        try:
            c.gateway.workers._add("decode", odd.address)
            link = c.gateway.workers.links[-1]
            await c.until(lambda: link.refused != "")
            assert "model_fingerprint differs: odd has" in link.refused
            assert "--model" in link.refused
            states = {item["id"]: item["state"] for item in c.gateway.workers.describe()}
            assert states[odd.address] == "refused"
        finally:
            await odd.kill()


async def test_a_stopped_worker_process_is_given_up_and_comes_back() -> None:
    control = await undisturbed()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.harness.scripted_worker", "--worker-id", "stopped", "--delay-seconds", "0.1",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with cluster(decode=address, worker_timeout_seconds=1.0, wait=False) as c:
            await c.until(lambda: len(c.model.workers.usable("decode")) == 1)
            request = asyncio.create_task(c.chat(max_tokens=40))
            await c.until(lambda: c.model.dispatcher.num_running == 1)  # it has a token, and 39 are to come
            process.send_signal(signal.SIGSTOP)
            c.gateway.workers._add("decode", c.decode[0].address)
            assert (await request).json()["choices"] == control["choices"]
            assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T"
            assert c.decode[0].submits[0].output_token_ids
            process.send_signal(signal.SIGCONT)
            await c.until(lambda: len(c.model.workers.usable("decode")) == 2)
    finally:
        process.kill()
        await process.wait()
