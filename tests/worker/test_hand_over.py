"""A running request moves between real worker processes, and its tokens are those of an undisturbed one."""

from __future__ import annotations

from typing import Any

import pytest

from mini_infer import LLM, SamplingParams
from protos import types_pb2 as pb
from tests.harness.worker import PROMPT, Stream, Worker, attached, tokens_of

MAX_TOKENS = 300
TRIES = 10  # a tiny model may end before a busy machine has let the test ask
SAMPLINGS = {"greedy": (0.0, 0), "seeded": (0.9, 7)}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1)
    params = {
        name: SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for name, (temperature, seed) in SAMPLINGS.items()
    }
    return {name: llm.generate([PROMPT], [given])[0].token_ids for name, given in params.items()}


def sampling(name: str) -> pb.SamplingParams:
    temperature, seed = SAMPLINGS[name]
    return pb.SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed)


async def hand_over(stream: Stream, name: str, after_tokens: int, **fields: Any) -> tuple[list[int], pb.TokenDelta]:
    """Submit a request and have it handed over after so many tokens; return the leg's tokens and its end.

    A request that has ended before the worker reads the command is not handed over, by contract: then try again.
    """
    for number in range(TRIES):
        tokens, delta = await _leg(stream, f"{name}-{number}", after_tokens, fields)
        if delta.finish_reason == pb.FINISH_REASON_PREFILLED:
            return tokens, delta
        assert delta.finish_reason == pb.FINISH_REASON_LENGTH
    raise AssertionError(f"{TRIES} requests have ended before they could move")


async def _leg(
    stream: Stream, name: str, after_tokens: int, fields: dict[str, Any]
) -> tuple[list[int], pb.TokenDelta]:
    await stream.submit(name, keep=True, **fields)
    tokens: list[int] = []
    asked = False
    while True:
        if not asked and len(tokens) >= after_tokens:
            asked = True
            await stream.hand_over(name)
        for delta in (await stream.report()).deltas:
            if delta.request_id == name:
                tokens += delta.token_ids
                if delta.finish_reason:
                    return tokens, delta


@pytest.mark.parametrize(("how", "after_tokens"), [("greedy", 0), ("seeded", 1), ("seeded", 20)])
async def test_a_kept_request_moves(
    workers: dict[str, Worker], expected: dict[str, list[int]], how: str, after_tokens: int
) -> None:
    salt = f"{how}-{after_tokens}"
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        first, delta = await hand_over(p, salt, after_tokens, cache_salt=salt, sampling=sampling(how))
        assert after_tokens < len(first) < MAX_TOKENS
        assert delta.kv_handle.num_tokens == len(PROMPT) + len(first) - 1
        await d.submit(
            salt, cache_salt=salt, sampling=sampling(how), output_token_ids=first, kv_handle=delta.kv_handle
        )
        deltas = await d.deltas_of(salt)
        assert first + tokens_of(deltas) == expected[how]
        times = deltas[0].times
        assert not times.kv_pull_failed
        assert times.num_pulled_tokens == len(PROMPT) + len(first) - 1
        await p.until_quiet()
        await d.until_quiet()


async def test_a_kept_request_that_nobody_moves_ends_here(
    workers: dict[str, Worker], expected: dict[str, list[int]]
) -> None:
    async with attached(workers["prefill"]) as p:
        await p.submit("stays", keep=True, cache_salt="stays", sampling=sampling("seeded"))
        tokens, delta = await p.until_end("stays")
        assert (tokens, delta.finish_reason) == (expected["seeded"], pb.FINISH_REASON_LENGTH)
        await p.hand_over("stays")  # it has ended: nothing happens
        await p.hand_over("never heard of")
        await p.until_quiet()


async def test_cancelled_while_it_is_handed_over(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p:
        for number in range(8):
            name = f"cancelled-{number}"
            await p.submit(name, keep=True, cache_salt="cancelled", sampling=sampling("greedy"))
            while not any(delta.request_id == name for delta in (await p.report()).deltas):
                pass
            await p.hand_over(name)
            await p.cancel(name)
        load = await p.until_quiet()
        assert load.num_leases == 0
