"""Latents that travel, from a worker of two ranks that expands them to one that attends to them as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from protos import types_pb2 as pb
from tests.cluster.harness import free_ports, save_with_tokenizer
from tests.engine.driving import random_prompt
from tests.engine.tiny_models import DEEPSEEK, TinyModel, reference_greedy
from tests.worker.harness import Worker, attached, by_tcp, prefill, ready

pytestmark = [pytest.mark.slow, pytest.mark.wing("engine.mla"), pytest.mark.wing("engine.tensor_parallel")]

TINY = TinyModel("DeepseekV2", {**DEEPSEEK, "vocab_size": 320})
PROMPTS = {transport: random_prompt(70, 256, seed) for seed, transport in enumerate(("shm", "tcp"))}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    path = save_with_tokenizer(TINY, folder / "model")
    engine = (f"--model={path}", "--dtype=float32", "--num-gpu-blocks=64", "--num-threads=1", "--kv-lease-seconds=60")
    roles = {"prefill": ("--mla=latent", "--tp=2"), "decode": ("--mla=absorbed",)}
    started = {
        role: Worker(role, folder, port, *extra, engine=engine)
        for (role, extra), port in zip(roles.items(), free_ports(2), strict=True)
    }
    with ready(started) as found:
        yield found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_worker_decodes_over_latents_of_another(workers: dict[str, Worker], transport: str) -> None:
    prompt = PROMPTS[transport]
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        first, handle = await prefill(p, transport, prompt_token_ids=prompt)
        if transport == "tcp":
            handle = by_tcp(handle)
        await d.submit(transport, prompt_token_ids=prompt, output_token_ids=first, kv_handle=handle)
        deltas: list[pb.TokenDelta] = []
        while not deltas or not deltas[-1].finish_reason:
            deltas += [delta for delta in (await d.report()).deltas if delta.request_id == transport]
        tokens = first + [token for delta in deltas for token in delta.token_ids]
        assert tokens == reference_greedy(TINY.build(), prompt, 16)
        times = deltas[0].times
        assert (times.transport, times.kv_pull_failed, times.num_pulled_tokens) == (transport, False, len(prompt))
        await p.until_quiet()
        await d.until_quiet()
