"""The real SmolLM2 through a prefill and a decode worker, in float32: its tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protos import types_pb2 as pb
from tests.harness.worker import Worker, attached, disaggregated, prefill_and_decode

pytestmark = pytest.mark.wing("common.gguf")
# What transformers 5.23 generates after loading the file by itself (`from_pretrained(gguf_file=...)`, float32).
PROMPT = [1, 2683, 198, 504, 3575, 282, 4649, 314, 2]
CONTINUATION = [198, 1, 520, 9531, 198, 504, 3575, 282, 4649, 314, 7042, 30, 2, 198, 2, 1, 9690, 198, 2, 198, 1]
CONTINUATION += [4093, 198, 57, 5248, 3946, 288]
FLOAT32 = ("--dtype=float32", "--num-gpu-blocks=64", "--block-size=4", "--num-threads=1")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    with prefill_and_decode(tmp_path_factory.mktemp("run"), FLOAT32) as found:
        yield found


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.wing("worker.tcp"))])
async def test_disaggregated_tokens_equal_those_of_transformers(workers: dict[str, Worker], transport: str) -> None:
    prompt, expected = PROMPT + CONTINUATION[:5], CONTINUATION[5:]
    sampling = pb.SamplingParams(max_tokens=len(expected))
    fields = {"prompt_token_ids": prompt, "sampling": sampling, "cache_salt": transport}
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        tokens, times = await disaggregated(p, d, "d", transport, **fields)
        assert tokens == expected
        assert (times.transport, times.num_pulled_tokens) == (transport, len(prompt))
