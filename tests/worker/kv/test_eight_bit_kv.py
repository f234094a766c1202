"""Workers with an 8-bit KV cache: blocks travel as they are, and never between caches of different types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import HandshakeError
from common.net.rpc import open_channel
from engine import LLM, SamplingParams
from protos import types_pb2 as pb
from router.workers.handshake import check_worker
from tests.harness.worker import (
    DRY_RUN,
    PROMPT,
    Worker,
    attached,
    disaggregated,
    prefill,
    prefill_and_decode,
    running,
    tokens_of,
)

FP8 = (*DRY_RUN, "--kv-cache-dtype=fp8")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    """A prefill and a decode worker with 8-bit blocks, and a decode worker with blocks of the model's type."""
    folder: Path = tmp_path_factory.mktemp("run")
    with (
        prefill_and_decode(folder, FP8) as eight_bit,
        running(Worker("decode", folder / "plain", engine=DRY_RUN)) as plain,
    ):
        yield eight_bit | {"plain": plain["decode"]}


def one_engine(kv_cache_dtype: str, prompt: list[int], max_tokens: int) -> list[int]:
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1, kv_cache_dtype=kv_cache_dtype)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return llm.generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_disaggregated_equals_one_engine(workers: dict[str, Worker], transport: str) -> None:
    expected = one_engine("fp8", PROMPT, 16)
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        tokens, times = await disaggregated(p, d, "d", transport, cache_salt=transport)
        assert tokens == expected
        assert (times.transport, times.num_pulled_tokens) == (transport, len(PROMPT))


async def test_blocks_of_another_type_are_computed_again(workers: dict[str, Worker]) -> None:
    async with attached(workers["prefill"]) as p, attached(workers["plain"]) as d:
        first, handle = await prefill(p, "other")
        await d.submit("other", output_token_ids=first, kv_handle=handle)
        deltas = await d.deltas_of("other")
        assert deltas[0].times.kv_pull_failed
        assert deltas[0].times.num_pulled_tokens == 0
        assert tokens_of(deltas) == one_engine("auto", PROMPT + first, 15)


async def test_the_router_refuses_a_mixture(workers: dict[str, Worker]) -> None:
    infos = []
    for name in ("decode", "plain"):
        async with open_channel(workers[name].address) as channel:
            infos.append(await workers[name].stub(channel).Describe(pb.DescribeRequest(), timeout=60))
    eight_bit, plain = infos
    assert (eight_bit.kv_dtype, plain.kv_dtype) == ("float8_e4m3fn", "float32")
    assert eight_bit.block_bytes * 4 == plain.block_bytes
    with pytest.raises(HandshakeError, match="--kv-cache-dtype"):
        check_worker(eight_bit, "decode", eight_bit.tokenizer_hash, [plain])
