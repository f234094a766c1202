"""Leases of real workers end by a message. They would last a minute here, so what ends soon did not expire."""

from __future__ import annotations

import asyncio

from protos import types_pb2 as pb
from tests.harness.worker import PROMPT, Stream, Worker, attached, prefill


async def until_leased(stream: Stream, count: int) -> None:
    while stream.load.num_leases != count:
        await stream.report()


async def test_release_frees_the_blocks_at_once(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p:
        _, handle = await prefill(p, "kept", cache_salt="kept")
        _, other = await prefill(p, "other", cache_salt="other")
        await until_leased(p, 2)
        assert p.load.kv_blocks_free + p.load.kv_blocks_cached < p.load.kv_blocks_total
        await p.release(handle.lease_id, handle.epoch + 1)  # of another life of the pool
        await p.release("guess", handle.epoch)
        await p.release(other.lease_id, other.epoch)
        await until_leased(p, 1)
        await p.release(handle.lease_id, handle.epoch)
        await p.release(handle.lease_id, handle.epoch)  # twice does no harm
        await p.until_quiet()


async def test_a_request_cancelled_between_prefill_and_decode_frees_both_sides(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        for number in range(8):  # the cancellation overtakes the pull, meets it, or comes after it
            name = f"left-{number}"
            first, handle = await prefill(p, name, cache_salt=name)
            await d.submit(name, cache_salt=name, output_token_ids=first, kv_handle=handle)
            await asyncio.sleep(number * 0.002)
            await d.cancel(name)
        await d.until_quiet()
        await p.until_quiet()


async def test_a_refused_submit_frees_its_lease(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        first, handle = await prefill(p, "bad", cache_salt="bad")
        sampling = pb.SamplingParams(temperature=-1.0)
        await d.submit("bad", cache_salt="bad", output_token_ids=first, kv_handle=handle, sampling=sampling)
        assert (await d.failure_of("bad")).param == "temperature"
        await p.until_quiet()


async def test_a_handle_that_the_cache_makes_needless_is_released(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        prompt = PROMPT[: len(PROMPT) // 16 * 16]  # whole blocks only
        await d.submit("warm", cache_salt="needless", prompt_token_ids=[*prompt, 65])
        await d.until_end("warm")
        first, handle = await prefill(p, "cold", cache_salt="needless", prompt_token_ids=prompt)
        await d.submit(
            "again", cache_salt="needless", prompt_token_ids=prompt, output_token_ids=first, kv_handle=handle
        )
        await d.until_end("again")
        await p.until_quiet()
        await d.until_quiet()
