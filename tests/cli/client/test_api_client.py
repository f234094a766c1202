import asyncio
import json

import pytest

from cli.client.api_client import ApiClient, ApiError, first_model
from cli.client.event_stream import RequestRecord
from common.errors import InvalidRequestError, UnavailableError
from tests.cli.load.sse_server import SILENCE, chunked, event, running

DONE = b"data: [DONE]\n\n"
RAW_LINE_SEPARATOR = 'data: {"choices": [{"delta": {"content": "b\u2028"}}]}\n\n'.encode()


def piece(text):
    return event(choices=[{"index": 0, "delta": {"content": text}}])


def ask(url, record, timeout_seconds=60.0):
    with ApiClient(url, api_key="k", timeout_seconds=timeout_seconds) as client:
        return list(client.stream_chat("m", [{"role": "user", "content": "q"}], record, max_tokens=3))


async def test_reasoning_comes_before_the_answer():
    parts = [event(choices=[{"delta": {"reasoning_content": "H"}}]), event(choices=[{"delta": {"reasoning": "m"}}])]
    record = RequestRecord()
    async with running(lambda _: chunked([*parts, piece("a"), DONE])) as server:
        pieces = await asyncio.to_thread(ask, server.url, record)
    assert pieces[-1] == "a"
    assert not any(pieces[:-1])
    assert (record.reasoning, len(record.chunk_times)) == ("Hm", 3)


async def test_an_answer_and_its_stats():
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    parts = [event(choices=[{"delta": {"role": "assistant"}}]), piece("a 🦜"), RAW_LINE_SEPARATOR, end]
    record = RequestRecord()
    async with running(lambda _: chunked([*parts, event(choices=[], usage=usage), DONE])) as server:
        assert await asyncio.to_thread(ask, server.url, record) == ["a 🦜", "b\u2028"]
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (9, 4, 2)
    assert 0 < record.ttft <= record.e2e
    assert server.requests[0]["max_tokens"] == 3
    assert "Bearer k" in server.requests[0]["head"]


@pytest.mark.parametrize(
    ("reply", "error", "told"),
    [
        (
            chunked([json.dumps({"error": {"message": "no such model"}}).encode()], "404 Not Found"),
            ApiError,
            "no such",
        ),
        (chunked([b"<html>"], "502 Bad Gateway"), ApiError, "HTTP 502"),
        (chunked([b"{}"], "401 Unauthorized"), ApiError, "--api-key"),
        (chunked([piece("a"), event(error={"message": "worker lost"})]), ApiError, "worker lost"),
        (chunked([piece("a"), b"data: {\n\n"]), ApiError, "no JSON"),
        (chunked([piece("a")], end=False), UnavailableError, "broke"),
        ([*chunked([piece("a")], end=False), SILENCE], UnavailableError, "broke"),
    ],
)
async def test_failures_are_one_line(reply, error, told):
    async with running(lambda _: reply) as server:
        with pytest.raises(error, match=told):
            await asyncio.to_thread(ask, server.url, RequestRecord(), 2.0 if SILENCE in reply else 60.0)


def test_nobody_listens():
    with (
        ApiClient("http://127.0.0.1:1") as client,
        pytest.raises(UnavailableError, match=r"no server answers.*mini-infer serve"),
    ):
        client.choose_model()


async def test_the_model_is_one_that_the_server_has():
    def choose(url, wanted):
        with ApiClient(url) as client:
            return client.choose_model(wanted)

    models = json.dumps({"data": [{"id": "small"}, {"id": "large"}]}).encode()
    async with running(lambda _: chunked([models])) as server:
        assert await asyncio.to_thread(choose, server.url, "") == "small"
        assert await asyncio.to_thread(choose, server.url, "large") == "large"
        with pytest.raises(InvalidRequestError, match="serves small, large, not /models/other: leave out --model"):
            await asyncio.to_thread(choose, server.url, "/models/other")


@pytest.mark.parametrize("body", [b"{}", b"<html>", b"[]", b'{"data": [1]}', b'{"data": []}'])
async def test_a_server_without_models(body):
    async with running(lambda _: chunked([body])) as server:
        with pytest.raises(ApiError, match="lists no model"):
            await asyncio.to_thread(first_model, server.url)
