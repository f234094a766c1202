"""Router, prefill, KV pull, decode and stream as real processes: the tokens equal those of one engine here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from engine import LLM, SamplingParams
from tests.cluster.harness import Cluster, running_cluster

PROMPTS = [
    "Hello",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "héllo wörld, 你好 🙂 " * 7,
    "x" * 700,
]


@pytest.fixture(scope="module")
def reference() -> LLM:
    """One engine without services: the oracle is tested against transformers elsewhere."""
    return LLM("dry-run", num_gpu_blocks=512, num_threads=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


def complete(cluster: Cluster, prompt: str, **options: object) -> str:
    answer = cluster.client().completions.create(model="dry-run", prompt=prompt, **options)  # type: ignore[call-overload]
    return str(answer.choices[0].text)


def expected_text(reference: LLM, prompt: str, params: SamplingParams) -> str:
    return reference.generate([prompt], params)[0].text


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_one_engine(cluster: Cluster, reference: LLM, prompt: str) -> None:
    expected = expected_text(reference, prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    options = {"max_tokens": 24, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    assert complete(cluster, prompt, **options) == expected
    assert complete(cluster, prompt, **options) == expected  # now from the prefix caches


def test_seeded_sampling_equals_one_engine(cluster: Cluster, reference: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.2, top_p=0.9, top_k=50, seed=7, ignore_eos=True)
    expected = expected_text(reference, PROMPTS[1], params)
    options = {"max_tokens": 24, "temperature": 1.2, "top_p": 0.9, "seed": 7}
    assert complete(cluster, PROMPTS[1], **options, extra_body={"ignore_eos": True, "top_k": 50}) == expected


def test_streamed_equals_unstreamed(cluster: Cluster) -> None:
    options = {"max_tokens": 32, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    whole = complete(cluster, PROMPTS[2], **options)
    chunks = cluster.client().completions.create(model="dry-run", prompt=PROMPTS[2], stream=True, **options)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole


def test_kv_is_really_pulled_by_the_best_transport(cluster: Cluster) -> None:
    prompt = "a prompt that no other test uses, long enough for several blocks of keys and values. " * 3
    answer = cluster.client().completions.create(
        model="dry-run", prompt=prompt, max_tokens=8, temperature=0.0, extra_body={"ignore_eos": True}
    )
    explained = cluster.get(f"/explain/{answer.id}")
    best = "cuda_ipc" if torch.cuda.is_available() else "shm"
    assert best in str(explained), explained
    workers = {worker["id"]: worker for worker in cluster.wait_quiet()}
    assert set(workers) == {"prefill-0", "decode-0"}


def test_many_at_once_equal_one_by_one(cluster: Cluster, reference: LLM) -> None:
    prompts = [f"request {i}: " + "lorem ipsum " * (i % 13) for i in range(32)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected = [c.text for c in reference.generate(prompts, params)]
    options = {"max_tokens": 16, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda prompt: complete(cluster, prompt, **options), prompts))
    assert texts == expected
    cluster.wait_quiet()


def test_chat(cluster: Cluster, reference: LLM) -> None:
    messages = [{"role": "user", "content": "Say something"}]
    expected = reference.chat(messages, SamplingParams(max_tokens=12, temperature=0.0))
    answer = cluster.client().chat.completions.create(
        model="dry-run",
        messages=messages,  # type: ignore[arg-type]
        max_completion_tokens=12,
        temperature=0.0,
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_a_client_that_leaves_frees_both_sides(cluster: Cluster) -> None:
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
    """Tokens that have come to the router."""
    text = httpx.get(cluster.url + "/metrics", timeout=60.0).text
    return sum(map(float, re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)))
