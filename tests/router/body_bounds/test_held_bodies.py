"""Bodies of many requests together: counted, refused, given up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import orjson
import pytest
from starlette.types import Message, Receive

from common.errors import ConfigError, OverloadedError
from router.body_bounds.held_bodies import UNCOUNTED_BYTES, HeldBodies
from router.config import HttpConfig
from tests.harness.router import Cluster, cluster
from tests.router.raw_http import HEAD

MB = 1 << 20
SMALL_BOUND: dict[str, Any] = {"max_body_memory_mb": 16}
SMALL = HttpConfig(**SMALL_BOUND)


class Body:
    """A body that arrives in pieces of the sizes given, held by `hold`."""

    def __init__(self, bodies: HeldBodies, *sizes: int, declared: int = 0) -> None:
        self._left = list(sizes)
        headers = [(b"content-length", b"%d" % declared)] if declared else []
        self._hold = bodies.hold({"type": "http", "headers": headers}, self._receive)

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": bytes(self._left.pop(0)), "more_body": True}

    async def __aenter__(self) -> Receive:
        return self._hold.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        self._hold.__exit__(*error)


async def test_bodies_count_until_they_are_given_up() -> None:
    bodies = HeldBodies(1000)
    async with Body(bodies, UNCOUNTED_BYTES, 300, 400) as first:
        await first()
        assert bodies.num_bytes == 0
        await first()
        await first()
        async with Body(bodies, UNCOUNTED_BYTES + 300, 1) as second:
            await second()
            assert bodies.num_bytes == 1000
            with pytest.raises(OverloadedError):
                await second()
        assert bodies.num_bytes == 700
    assert bodies.num_bytes == 0


@pytest.mark.parametrize(("declared", "is_refused"), [(1000, False), (1001, True)])
async def test_a_body_that_will_not_fit_is_refused_before_it_comes(declared: int, is_refused: bool) -> None:
    async with Body(HeldBodies(1000), 1, declared=UNCOUNTED_BYTES + declared) as receive:
        with pytest.raises(OverloadedError) if is_refused else nullcontext():
            await receive()


def test_the_largest_body_always_fits_an_idle_router() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        HttpConfig(**SMALL_BOUND | {"max_body_memory_mb": 15})


async def send_half_of(c: Cluster, stack: AsyncExitStack, num_bytes: int) -> asyncio.StreamWriter:
    """Send a request with only the first half of its body."""
    _, writer = await asyncio.open_connection("127.0.0.1", c.port)
    stack.callback(writer.close)
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % num_bytes + b" " * (num_bytes // 2))
    return writer


@pytest.mark.parametrize("has_length", [True, False])
async def test_beyond_the_bound_large_requests_get_429_and_small_ones_an_answer(has_length: bool) -> None:
    large = b'{"prompt":"x","max_tokens":1' + b" " * (8 * MB) + b"}"

    async def pieces():
        for start in range(0, len(large), MB):
            yield large[start : start + MB]

    headers = {"content-type": "application/json"}
    async with cluster(http=SMALL) as c, AsyncExitStack() as stack:
        held = c.gateway.memory["body_bytes"]
        writers = [await send_half_of(c, stack, 10 * MB) for _ in range(2)]
        await c.until(lambda: held() > 10 * MB - 3 * UNCOUNTED_BYTES)
        content = large if has_length else pieces()
        refused = await c.http.post("/v1/completions", content=content, headers=headers)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await c.complete("x" * 30_000, truncate_prompt_tokens=5, max_tokens=1)).status_code == 200
        for writer in writers:
            writer.close()
        await c.until(lambda: held() == 0)
        answer = await c.http.post("/v1/completions", content=large, headers=headers)
        assert answer.status_code == 200
        assert held() == 0


async def test_a_body_is_given_up_before_its_answer_is_made() -> None:
    async with cluster(http=SMALL) as c:
        c.decode[0].script.is_silent = True
        content = orjson.dumps({"prompt": "x", "max_tokens": 1}) + b" " * MB
        request = asyncio.create_task(
            c.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        )
        await c.until(lambda: bool(c.decode[0].submits))
        assert c.gateway.memory["body_bytes"]() == 0
        request.cancel()
        await c.until(c.is_quiet)
