"""Workers with an 8-bit KV cache: blocks are transferred as they are, and routers learn their dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.net.rpc import open_channel
from mini_infer import LLM, SamplingParams
from protos import types_pb2 as pb
from tests.harness.worker import DRY_RUN, PROMPT, Worker, attached, disaggregated, prefill_and_decode


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    with prefill_and_decode(tmp_path_factory.mktemp("run"), (*DRY_RUN, "--kv-cache-dtype=fp8")) as found:
        yield found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_disaggregated_equals_one_engine(workers: dict[str, Worker], transport: str) -> None:
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1, kv_cache_dtype="fp8")
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected = llm.generate([PROMPT], params)[0].token_ids
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        tokens, times = await disaggregated(p, d, "d", transport, cache_salt=transport)
        assert tokens == expected
        assert (times.transport, times.num_pulled_tokens) == (transport, len(PROMPT))
    async with open_channel(workers["decode"].address) as channel:
        info = await workers["decode"].stub(channel).Describe(pb.DescribeRequest(), timeout=60)
    assert info.kv_dtype == "float8_e4m3fn"  # by which routers refuse mixtures
