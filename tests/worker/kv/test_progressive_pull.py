"""Progressive pull between real workers, driven over gRPC as a router drives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.net.rpc import open_channel
from engine import LLM, SamplingParams
from protos import types_pb2 as pb
from tests.harness.worker import (
    DRY_RUN,
    MINUTE_LONG,
    PROMPT,
    SLOW,
    Stream,
    Worker,
    attached,
    by_tcp,
    prefill_and_decode,
    tokens_of,
)

CHUNK_TOKENS, BLOCK_TOKENS = 40, 16
NUM_CHUNKS = -(-len(PROMPT) // CHUNK_TOKENS)
CHUNKED = (*DRY_RUN, f"--max-num-batched-tokens={CHUNK_TOKENS}")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    with prefill_and_decode(tmp_path_factory.mktemp("run"), CHUNKED) as found:
        yield found


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Worker]]:
    """Workers for one test; its parameter: further flags."""
    with prefill_and_decode(tmp_path, (*CHUNKED, *getattr(request, "param", ()))) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1)
    return llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))[0].token_ids


async def prefill_in_parts(stream: Stream, name: str) -> tuple[list[pb.KvOffer], pb.TokenDelta]:
    """Offers of the parts of the prompt, and the only delta."""
    await stream.submit(name, cache_salt=name)
    parts: list[pb.KvOffer] = []
    while True:
        report = await stream.report()
        parts += report.kv_offers
        if report.deltas:
            [delta] = report.deltas
            assert delta.finish_reason
            assert {part.request_id for part in parts} == {name}
            return parts, delta


def offer_by_tcp(part: pb.KvOffer) -> pb.KvOffer:
    return pb.KvOffer(kv_handle=by_tcp(part.kv_handle), block_keys=part.block_keys)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_only_the_rest_is_pulled_at_the_end(
    workers: dict[str, Worker], expected: list[int], transport: str
) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        parts, last = await prefill_in_parts(p, transport)
        handle = last.kv_handle
        if transport == "tcp":
            parts, handle = [offer_by_tcp(part) for part in parts], by_tcp(handle)
        for part in parts:
            await d.prefetch(part)
        await d.submit("d", cache_salt=transport, output_token_ids=last.token_ids, kv_handle=handle)
        deltas = await d.deltas_of("d")
        assert [*last.token_ids, *tokens_of(deltas)] == expected
        num_ready = (NUM_CHUNKS - 1) * CHUNK_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
        times = deltas[0].times
        assert (times.num_cached_tokens, times.num_pulled_tokens) == (num_ready, len(PROMPT) - num_ready)
        assert (times.transport, times.kv_pull_failed) == (transport, False)
        await p.until_quiet()
        await d.until_quiet()


async def test_what_a_decode_worker_cannot_use_is_released(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        parts, last = await prefill_in_parts(p, "useless")
        assert len(parts) == NUM_CHUNKS - 1
        parts[1].kv_handle.num_tokens -= 1
        parts[2].block_keys.pop()
        for part in parts:
            await d.prefetch(part)
        for handle in (last.kv_handle, pb.KvHandle(lease_id="x", shards=[b"nonsense"])):  # are of no full blocks
            await d.prefetch(pb.KvOffer(kv_handle=handle))
        await p.until_quiet()
        await d.until_quiet()


async def test_parts_of_a_cancelled_prompt_are_the_routers_to_release(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p:
        await p.submit("left", cache_salt="left", prompt_token_ids=PROMPT * 8)
        while not (parts := list((await p.report()).kv_offers)):
            pass
        await p.cancel("left")
        while p.load.num_running:  # parts that were reported meanwhile are the router's to release
            parts += (await p.report()).kv_offers
        for part in parts:
            await p.release(part.kv_handle.lease_id, part.kv_handle.epoch)
        await p.until_quiet()


async def test_a_prefill_worker_that_dies_before_its_parts_are_pulled(
    pair: dict[str, Worker], expected: list[int]
) -> None:
    async with attached(pair["decode"]) as d:
        async with attached(pair["prefill"]) as p:
            parts, last = await prefill_in_parts(p, "dead")
        pair["prefill"].service.kill()
        for part in parts:
            await d.prefetch(offer_by_tcp(part))
        handle = by_tcp(last.kv_handle)
        await d.submit("d", cache_salt="dead", output_token_ids=last.token_ids, kv_handle=handle)
        tokens, _ = await d.until_end("d")
        assert [*last.token_ids, *tokens] == expected
        await d.until_quiet()


@pytest.mark.wing("engine.simulated")
@pytest.mark.parametrize("pair", [SLOW], indirect=True, ids=["slow"])
async def test_a_draining_worker_prefetches_nothing(pair: dict[str, Worker]) -> None:
    async with attached(pair["prefill"]) as p, attached(pair["decode"]) as d:
        await d.submit("open", prompt_token_ids=PROMPT[:5], sampling=MINUTE_LONG)
        while not (await d.report()).deltas:
            pass
        async with open_channel(pair["decode"].address) as channel:
            await pair["decode"].stub(channel).Drain(pb.DrainRequest(grace_seconds=200.0))
        parts, last = await prefill_in_parts(p, "drain")
        await d.submit("refused")
        assert (await d.failure_of("refused")).code == pb.FAILURE_CODE_UNAVAILABLE
        for part in parts:
            await d.prefetch(part)
        await p.release(last.kv_handle.lease_id, last.kv_handle.epoch)
        await p.until_quiet()
        await d.cancel("open")
        await d.until_broken()  # it has told all, and ends
        assert not d.keys & {key for part in parts for key in part.block_keys}


@pytest.mark.parametrize("pair", [("--no-prefix-cache",)], indirect=True, ids=str)
async def test_without_a_prefix_cache_parts_are_let_go(pair: dict[str, Worker], expected: list[int]) -> None:
    async with attached(pair["prefill"]) as p, attached(pair["decode"]) as d:
        parts, last = await prefill_in_parts(p, "off")
        assert len(parts) == NUM_CHUNKS - 1
        for part in parts:
            await d.prefetch(part)
        await d.submit("d", cache_salt="off", output_token_ids=last.token_ids, kv_handle=last.kv_handle)
        tokens, _ = await d.until_end("d")
        assert [*last.token_ids, *tokens] == expected
        await p.until_quiet()
        await d.until_quiet()
