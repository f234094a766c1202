"""Transfer of MLA latents from a worker of two ranks, which expands them, to one that attends to them directly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.driving import random_prompt
from tests.engine.tiny_models import DEEPSEEK, TinyModel, reference_greedy
from tests.harness.cluster import save_with_tokenizer
from tests.harness.worker import Worker, attached, disaggregated, running

pytestmark = [pytest.mark.slow, pytest.mark.wing("engine.mla"), pytest.mark.wing("engine.tensor_parallel")]

TINY = TinyModel("DeepseekV2", {**DEEPSEEK, "vocab_size": 320})
PROMPTS = {transport: random_prompt(70, 256, seed) for seed, transport in enumerate(("shm", "tcp"))}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    folder = tmp_path_factory.mktemp("run")
    path = save_with_tokenizer(TINY, folder / "model")
    engine = (f"--model={path}", "--dtype=float32", "--num-gpu-blocks=64", "--num-threads=1", "--kv-lease-seconds=60")
    roles = {"prefill": ("--mla=latent", "--tp=2"), "decode": ("--mla=absorbed",)}
    with running(*(Worker(role, folder, *flags, engine=engine) for role, flags in roles.items())) as found:
        yield found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_worker_decodes_over_latents_of_another(workers: dict[str, Worker], transport: str) -> None:
    prompt = PROMPTS[transport]
    async with attached(workers["prefill"]) as p, attached(workers["decode"]) as d:
        tokens, times = await disaggregated(p, d, "d", transport, prompt_token_ids=prompt)
        assert tokens == reference_greedy(TINY.build(), prompt, 16)
        assert (times.transport, times.kv_pull_failed, times.num_pulled_tokens) == (transport, False, len(prompt))
