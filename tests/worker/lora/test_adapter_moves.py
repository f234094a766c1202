"""A running request of an adapter moves between workers and back; neither has been told of the adapter before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.lora.adapter_ref import AdapterRef
from engine import LLM, SamplingParams
from engine.loader.random_weights import DRY_RUN_CONFIG
from protos import types_pb2 as pb
from tests.engine.driving import answers
from tests.harness.adapters import shapes_of_config, write_adapter
from tests.harness.worker import DRY_RUN, PROMPT, Worker, attached, prefill_and_decode
from tests.worker.test_hand_over import MAX_TOKENS, hand_over, sampling

pytestmark = pytest.mark.wing("engine.lora")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[dict[str, Worker]]:
    with prefill_and_decode(tmp_path / "run", engine=(*DRY_RUN, "--enable-lora")) as found:
        yield found


async def test_a_request_moves_there_and_back(workers: dict[str, Worker], tmp_path: Path) -> None:
    shapes = shapes_of_config(DRY_RUN_CONFIG)
    adapter = str(AdapterRef.of(write_adapter(tmp_path / "adapter", shapes, ("_proj", "lm_head"), std=0.3)))
    llm = LLM("dry-run", num_gpu_blocks=256, num_threads=1, enable_lora=True)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=7, ignore_eos=True)
    [expected] = answers(llm.engine, [PROMPT], params, adapter=adapter)
    fields = {"adapter": adapter, "sampling": sampling("seeded")}
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        tokens, delta = await hand_over(p, "there", 5, **fields)
        more, delta = await hand_over(d, "back", 5, output_token_ids=tokens, kv_handle=delta.kv_handle, **fields)
        tokens += more
        await p.submit("again", keep=True, output_token_ids=tokens, kv_handle=delta.kv_handle, **fields)
        more, delta = await p.until_end("again")
        assert delta.finish_reason == pb.FINISH_REASON_LENGTH
        assert tokens + more == expected
        await p.until_quiet()
        await d.until_quiet()
