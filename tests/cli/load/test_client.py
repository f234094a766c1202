import asyncio
import time

import pytest

from cli.load.client import Client, Target
from cli.load.workload import PlannedRequest
from common.errors import ConfigError
from tests.cli.load.sse_server import SILENCE, chunked, event, running, text_chunks


async def ask(script, *, count=1, timeout_seconds=30.0, request=None, **target):
    async with running(script) as server:
        client = Client(Target(server.url, "m", **target), timeout_seconds)
        begin = time.perf_counter()
        records = [
            await client.complete(request or PlannedRequest(0.0, "a b c", 5), 0.0, begin) for _ in range(count)
        ]
        client.close()
        await asyncio.sleep(0)  # the loop closes what was aborted
        return records, server


async def test_a_stream_is_counted_chunk_by_chunk():
    (record,), server = await ask(lambda _: chunked(text_chunks(5, prompt_tokens=9, cached=4)))
    assert record.error == ""
    assert len(record.chunk_times) == 5
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (9, 5, 4)
    assert record.sent <= record.chunk_times[0] <= record.chunk_times[-1] <= record.end
    sent = server.requests[0]
    assert (sent["prompt"], sent["max_tokens"], sent["min_tokens"], sent["ignore_eos"]) == ("a b c", 5, 5, True)
    assert "POST /v1/completions HTTP/1.1" in sent["head"]


async def test_events_may_be_cut_anywhere():
    whole = b"".join(text_chunks(3))
    for size in (1, 7, 50):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        (record,), _ = await ask(lambda _, parts=parts: chunked(parts))
        assert (record.error, len(record.chunk_times), record.num_output_tokens) == ("", 3, 3)


async def test_a_connection_is_used_again():
    records, server = await ask(lambda _: chunked(text_chunks(2)), count=3)
    assert [record.error for record in records] == [""] * 3
    assert server.num_connections == 1


async def test_chat_endpoint_and_key():
    def script(_):
        delta = event(choices=[{"delta": {"content": "hi"}}])
        return chunked([event(choices=[{"delta": {"role": "assistant"}}]), delta, b"data: [DONE]\n\n"])

    (record,), server = await ask(script, endpoint="chat", api_key="k", exact_output=False)
    assert (record.error, len(record.chunk_times)) == ("", 1)
    sent = server.requests[0]
    assert sent["messages"] == [{"role": "user", "content": "a b c"}]
    assert "Authorization: Bearer k" in sent["head"]
    assert "min_tokens" not in sent


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (chunked([b'{"error": {}}'], status="429 Too Many Requests"), "http 429"),
        (chunked([event(error={"message": "x"}), b"data: [DONE]\n\n"]), "error event"),
        (chunked([event(choices=[{"text": "a"}])]), "incomplete"),
        (chunked([event(choices=[{"text": "a"}])], end=False), "disconnected"),
        (chunked([b"data: {\n\n", b"data: [DONE]\n\n"]), "not JSON"),
        (chunked([b"data: null\n\n", b"data: [DONE]\n\n"]), "not JSON"),
        ([b"SSH-2.0-nothing\r\n\r\n"], "not HTTP"),
        ([], "disconnected"),
    ],
)
async def test_each_failure_has_its_kind_and_the_next_request_works(reply, error):
    replies = iter([reply, chunked(text_chunks(1))])
    (bad, good), _ = await ask(lambda _: next(replies), count=2)
    assert bad.error == error
    assert good.error == ""


async def test_nobody_listens():
    client = Client(Target("http://127.0.0.1:1", "m"))
    record = await client.complete(PlannedRequest(0.0, "a", 1), 0.0, 0.0)
    assert record.error == "connect"


async def test_silence_is_a_timeout_and_the_connection_is_not_used_again():
    silent = [*chunked([event(choices=[{"text": "a"}])], end=False), SILENCE]
    replies = iter([silent, chunked(text_chunks(1))])
    (late, good), server = await ask(lambda _: next(replies), count=2, timeout_seconds=3.0)
    assert (late.error, len(late.chunk_times)) == ("timeout", 1)
    assert good.error == ""
    assert server.num_connections == 2


async def test_wrong_use_is_refused():
    with pytest.raises(ConfigError, match="--url"):
        Client(Target("127.0.0.1:8000", "m"))
    with pytest.raises(ConfigError, match="--vocab-size"):
        Target("http://x", "m", endpoint="chat").body(PlannedRequest(0.0, [1, 2], 1))
