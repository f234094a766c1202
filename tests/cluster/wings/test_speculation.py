"""Speculation through HTTP: the answers of an engine without it, several tokens in one event, and its metrics."""

from __future__ import annotations

import re
import threading

import httpx
import openai
import pytest

from engine import LLM, SamplingParams
from tests.cluster.harness import Cluster, free_ports, running_cluster

ENGINE = (
    "--model=dry-run",
    "--num-gpu-blocks=256",
    "--quant-mode=none",
    "--num-speculative-tokens=4",
    "--ngram-min=1",
)
PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 5, "x" * 400]
# Few tokens to choose from: what was said comes again, and is drafted.
GREEDY = {"max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True, "allowed_token_ids": [97, 98, 99]}}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 5, "presence_penalty": 0.4, "logprobs": 2}


@pytest.fixture(scope="module")
def reference() -> LLM:
    return LLM("dry-run", num_gpu_blocks=256, num_threads=1)


def expected_texts(reference: LLM) -> list[str]:
    few = {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": (97, 98, 99)}
    greedy = SamplingParams(temperature=0.0, **few)  # type: ignore[arg-type]
    sampled = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.4, logprobs=2, **few)  # type: ignore[arg-type]
    return [answer.text for params in (greedy, sampled) for answer in reference.generate(PROMPTS, params)]


def texts(cluster: Cluster) -> list[str]:
    """Of all prompts at once, streamed; log-probabilities fit the tokens."""
    asked = [(prompt, options) for options in (GREEDY, SAMPLED) for prompt in PROMPTS]
    found = [""] * len(asked)

    def ask(index: int) -> None:
        prompt, options = asked[index]
        stream = cluster.client().completions.create(model="dry-run", prompt=prompt, stream=True, **options)  # type: ignore[call-overload]
        for chunk in stream:
            for choice in chunk.choices:
                found[index] += choice.text
                if "logprobs" in options and choice.text:
                    assert len(choice.logprobs.token_logprobs) == len(choice.text)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200.0)
    return found


def counter(port: int, name: str) -> float:
    body = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60.0).text
    return float(re.search(rf"^{name}_total{{.*}} (\S+)$", body, re.MULTILINE)[1])  # type: ignore[index]


def test_drafts_change_no_answer(reference: LLM) -> None:
    """Nor do drafts that two ranks verify; one rank's are those of the next test."""
    [port] = free_ports(1)
    with running_cluster(engine_args=ENGINE, role_args={"decode": ["--tp=2", f"--metrics-port={port}"]}) as cluster:
        assert texts(cluster) == expected_texts(reference)
        cluster.wait_quiet()
        drafted = counter(port, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(port, "vllm:spec_decode_num_accepted_tokens")
        assert 60 < accepted < drafted


def test_a_stream_moves_to_another_worker_with_its_drafts(reference: LLM) -> None:
    params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True, allowed_token_ids=(97, 98, 99))
    [expected] = reference.generate(PROMPTS[1], params)
    with running_cluster(num_decode=2, engine_args=ENGINE) as cluster:
        assert texts(cluster) == expected_texts(reference)
        for _ in range(10):  # it may end before its worker does
            answer = ask_and_kill(cluster)
            assert answer.choices[0].text == expected.text
            if num_migrations := cluster.get(f"/explain/{answer.id}")["choices"][0]["migrations"]:
                assert num_migrations == 1
                return
            cluster.wait_ready(3)
    pytest.fail("no stream moved")


def ask_and_kill(cluster: Cluster) -> openai.types.Completion:
    """The answer to a request whose decode worker got SIGKILL, and was started again."""
    options = {**GREEDY, "max_tokens": 1500}
    found = []

    def ask() -> None:
        with cluster.client() as client:
            found.append(client.completions.create(model="dry-run", prompt=PROMPTS[1], **options))  # type: ignore[call-overload]

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        if busy := [w["id"] for w in cluster.get("/v1/cluster")["workers"] if is_decoding(w)]:
            cluster.services[busy[0]].kill()
            thread.join(200.0)
            cluster.start_service(busy[0])
    [answer] = found
    return answer


def is_decoding(worker: dict[str, dict[str, int]]) -> bool:
    return str(worker["id"]).startswith("decode") and worker["load"]["running"] > 0
