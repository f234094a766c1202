"""Every answer with status 500 is logged with its origin and the request's id, but without its text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import EngineError, traceback_text
from common.logging import RateLimit
from protos import types_pb2 as pb
from router.api.text import ChoiceText
from router.dispatch import Dispatcher
from router.http.answer import EventStream
from router.http.chunk_writer import ChunkWriter
from router.http.errors import retry_after
from tests.harness.router import TWO_CHOICES, Cluster, cluster
from tests.harness.scripted_worker import Script

SECRET = "the sparrow flies at noon"
INTERNAL = {"message": "internal error", "type": "server_error", "param": None, "code": None}


@pytest.fixture(autouse=True)
def fresh_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fresh rate limits of the logs, whose window never ends."""
    monkeypatch.setattr("common.logging.WINDOW_SECONDS", float("inf"))
    for name in ("router.http.errors", "router.choice"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [RateLimit()])


def broken(*_: Any, **__: Any) -> None:
    raise KeyError(SECRET)  # as a bug in a dictionary's use would: its message is the text


def logged(caplog: pytest.LogCaptureFixture, request_id: str) -> str:
    """Return the only log entry for the request."""
    entries = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(entries) == 1, entries
    assert f"request {request_id} failed with status 500" in entries[0]
    return entries[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "where", [(Dispatcher, "admit"), (Dispatcher, "place"), (ChoiceText, "push")], ids=lambda where: str(where[1])
)
async def test_a_bug_is_logged_with_its_traceback_and_without_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: tuple[type, str], stream: bool
) -> None:
    async with cluster() as c:
        with monkeypatch.context() as patch:
            patch.setattr(*where, broken)
            answer = await c.chat(SECRET, stream=stream)
        assert answer.status_code == 500
        assert answer.json() == {"error": INTERNAL}
        entry = logged(caplog, answer.headers["x-request-id"])
        assert "in broken" in entry
        assert entry.endswith("KeyError")
        assert (await c.chat(SECRET)).status_code == 200
    assert SECRET not in caplog.text


async def test_a_bug_in_the_middle_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once where a token is decoded, once where the slow path renders it."""
    for owner, method in ((ChoiceText, "push"), (EventStream, "_rendered")):
        caplog.clear()
        async with cluster(script=Script(delay_seconds=0.005)) as c:
            with monkeypatch.context() as patch:
                if owner is EventStream:
                    patch.setattr(ChunkWriter, "is_ready", property(lambda self: False))
                patch.setattr(owner, method, breaking_after(getattr(owner, method), 3))
                events = await c.events(messages=[{"role": "user", "content": SECRET}], **TWO_CHOICES)
            assert events[-2] == {"error": INTERNAL}
            assert events[-1] == "[DONE]"
            entry = logged(caplog, events[0]["id"])
            assert "in breaking" in entry
            assert "KeyError" in entry
            await c.until(c.is_quiet)
        assert SECRET not in caplog.text


def breaking_after(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    calls = 0

    def breaking(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return broken() if calls > count else function(*arguments)

    return breaking


async def test_a_workers_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(script=Script(refuse=pb.FAILURE_CODE_INTERNAL)) as c:
        answer = await c.chat(SECRET)
        assert answer.status_code == 500
        entry = logged(caplog, answer.headers["x-request-id"])
        assert "EngineError: refused by script" in entry
    assert SECRET not in caplog.text


@pytest.mark.wing("router.connections")
async def test_what_a_stranger_can_repeat_is_logged_a_few_times(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as c:
        monkeypatch.setattr(Dispatcher, "admit", broken)
        for _ in range(30):
            assert (await c.chat(SECRET)).status_code == 500
            _, writer = await asyncio.open_connection("127.0.0.1", c.port)
            writer.write(b"\0garbage\r\n\r\n")
            writer.close()
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert 0 < len(lines) <= 10, {r.getMessage()[:80] for r in lines}


async def test_what_clients_do_wrong_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as c:
        assert (await c.chat(SECRET, temperature=-1)).status_code == 400
        assert (await c.http.get("/nowhere")).status_code == 404
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"stream": True, "logprobs": True}, marks=pytest.mark.wing("router.answer_details")),
        pytest.param({"stop": "x", "n": 2}, marks=pytest.mark.wing("router.stop_strings")),
    ],
    ids=str,
)
async def test_nothing_said_is_logged_at_any_level(caplog: pytest.LogCaptureFixture, fields: dict[str, Any]) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("httpcore", "httpx", "openai"):  # the client's log is not ours
        logging.getLogger(name).setLevel(logging.WARNING)
    reply = "and the owl answers"
    async with cluster(num_prefill=1, local_prefill_tokens=0, script=Script(reply=list(reply.encode()))) as c:
        assert (await c.chat(SECRET, max_tokens=40, **fields)).status_code == 200
        await break_a_request(c)
    assert "moves to another worker" in caplog.text
    for text in (SECRET, reply, reply[:8], str(list(SECRET.encode()))[1:40]):
        assert text not in caplog.text


async def break_a_request(c: Cluster) -> None:
    c.prefill[0].script.refuse = pb.FAILURE_CODE_UNAVAILABLE
    assert (await c.chat(SECRET)).status_code == 200


def test_tracebacks_show_causes_once_and_only_our_messages() -> None:
    try:
        try:
            broken()
        except KeyError as cause:
            raise EngineError("our own words") from cause
    except EngineError as error:
        error.__cause__.__context__ = error  # type: ignore[union-attr]  # a circle
        text = traceback_text(error)
    assert text.count("Traceback") == 2
    assert "EngineError: our own words" in text
    assert text.endswith("KeyError")
    assert SECRET not in text


@pytest.mark.parametrize(
    ("expected", "least", "most"), [(0.0, 1, 3), (1.2, 2, 4), (10.0, 10, 15), (40.0, 40, 60), (1e6, 40, 60)]
)
def test_refused_clients_come_back_one_after_the_other(expected: float, least: int, most: int) -> None:
    draws = [number / 100 for number in range(100)]
    assert {retry_after(expected, draw) for draw in draws} == set(range(least, most + 1))
