"""Router, prefill, KV pull, decode and stream as real processes: the tokens equal those of one engine here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import assemble
from engine.config import EngineConfig
from engine.request import SamplingParams
from tests.harness.cluster import Cluster, metric, running_cluster

PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 4, "héllo wörld, 你好 🙂 " * 7, "x" * 700]


class OneEngine:
    """An engine without services: the oracle is tested against transformers elsewhere."""

    def __init__(self) -> None:
        self._engine = assemble(EngineConfig("dry-run", num_gpu_blocks=512, num_threads=1)).engine
        self.tokenizer = load_tokenizer(resolve_model("dry-run"))

    def texts(self, prompts: list[str], params: SamplingParams) -> list[str]:
        asked = [self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
        requests = [self._engine.add_request(token_ids, params) for token_ids in asked]
        while self._engine.has_work():
            self._engine.step()
        return [self.tokenizer.decode(request.output_token_ids) for request in requests]


@pytest.fixture(scope="module")
def one_engine() -> OneEngine:
    return OneEngine()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_one_engine(cluster: Cluster, one_engine: OneEngine, prompt: str) -> None:
    expected = one_engine.texts([prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    assert [cluster.answer(prompt, 24)] == expected
    assert [cluster.answer(prompt, 24)] == expected  # now from the prefix caches


def test_seeded_sampling_equals_one_engine(cluster: Cluster, one_engine: OneEngine) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.9, top_k=50, seed=7, ignore_eos=True)
    text = cluster.answer(PROMPTS[1], 24, temperature=1.2, top_p=0.9, top_k=50, seed=7)
    assert [text] == one_engine.texts([PROMPTS[1]], params)


@pytest.mark.wing("router.explain")
def test_kv_is_really_pulled_by_the_best_transport(cluster: Cluster) -> None:
    prompt = "a prompt that no other test uses, long enough for several blocks of keys and values. " * 3
    _, decode = cluster.legs_of(cluster.ask(prompt, 8).id)
    assert decode["transport"] == ("cuda_ipc" if torch.cuda.is_available() else "shm")
    assert {worker["id"] for worker in cluster.wait_quiet()} == {"prefill-0", "decode-0"}


def test_many_at_once_equal_one_by_one(cluster: Cluster, one_engine: OneEngine) -> None:
    prompts = [f"request {i}: " + "lorem ipsum " * (i % 13) for i in range(32)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [*pool.map(cluster.answer, prompts)] == one_engine.texts(prompts, params)


@pytest.mark.wing("router.cluster_state")
@pytest.mark.wing("router.completions_api")
def test_a_client_that_leaves_frees_both_sides(cluster: Cluster) -> None:
    cluster.wait_quiet()  # as the previous tests do
    for _ in range(5):  # on a busy machine this one may leave late
        before = num_generated(cluster)
        stream = cluster.client().completions.create(
            model="dry-run", prompt="endless", n=32, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        cluster.wait_quiet()
        if num_generated(cluster) - before < 32 * 1500 / 2:
            return
    pytest.fail("all was computed that nobody reads")


def num_generated(cluster: Cluster) -> float:
    """Return the number of tokens that have reached the router."""
    return metric(cluster.url, r"vllm:generation_tokens_total\{.*\}")
