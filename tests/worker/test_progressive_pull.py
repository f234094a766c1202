"""Progressive pull between real workers, driven over gRPC as a router drives them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine import LLM, SamplingParams
from protos import types_pb2 as pb
from tests.worker.harness import DRY_RUN, PROMPT, Stream, Worker, attached, by_tcp, prefill_and_decode

CHUNK_TOKENS, BLOCK_TOKENS = 40, 16
NUM_CHUNKS = -(-len(PROMPT) // CHUNK_TOKENS)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    engine = (*DRY_RUN, f"--max-num-batched-tokens={CHUNK_TOKENS}")
    with prefill_and_decode(tmp_path_factory.mktemp("run"), engine) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1)
    return llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))[0].token_ids


async def prefill_in_parts(stream: Stream, name: str) -> tuple[list[pb.KvHandle], pb.TokenDelta]:
    """Handles on the parts of the prompt, and the last delta."""
    await stream.submit(name, cache_salt=name)
    parts: list[pb.KvHandle] = []
    while True:
        for delta in (await stream.report()).deltas:
            if delta.finish_reason:
                return parts, delta
            assert not delta.token_ids
            assert not delta.HasField("times")  # those come with the first token
            parts.append(delta.kv_handle)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_only_the_rest_is_pulled_at_the_end(
    workers: dict[str, Worker], expected: list[int], transport: str
) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        parts, last = await prefill_in_parts(p, transport)
        handle = last.kv_handle
        if transport == "tcp":
            parts, handle = [by_tcp(part) for part in parts], by_tcp(handle)
        for part in parts:
            await d.prefetch(part)
        await d.submit("d", cache_salt=transport, output_token_ids=last.token_ids, kv_handle=handle)
        deltas: list[pb.TokenDelta] = []
        while not deltas or not deltas[-1].finish_reason:
            deltas += [delta for delta in (await d.report()).deltas if delta.request_id == "d"]
        assert [*last.token_ids, *(t for delta in deltas for t in delta.token_ids)] == expected
        num_ready = (NUM_CHUNKS - 1) * CHUNK_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
        times = deltas[0].times
        assert (times.num_cached_tokens, times.num_pulled_tokens) == (num_ready, len(PROMPT) - num_ready)
        assert (times.transport, times.kv_pull_failed) == (transport, False)
        await p.until_quiet()
        await d.until_quiet()
