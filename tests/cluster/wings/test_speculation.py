"""Speculation through HTTP: the answers of an engine without it, several tokens in one event, and its metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from engine import LLM, SamplingParams
from engine.loader.random_weights import DRY_RUN_CONFIG
from tests.engine.speculation.eagle.heads import RandomHead
from tests.harness.cluster import Cluster, free_ports, metric, running_cluster

ENGINE = ("--model=dry-run", "--num-gpu-blocks=256", "--quant-mode=none")
DRAFTS = ("--num-speculative-tokens=4", "--ngram-min=1", "--no-adaptive-drafts")
PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 5, "x" * 400]
# Few tokens to choose from: what was said comes again, and is drafted.
GREEDY = {"max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True, "allowed_token_ids": [97, 98, 99]}}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 5, "presence_penalty": 0.4, "logprobs": 2}


def expected_texts(reference: LLM) -> list[str]:
    few = {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": (97, 98, 99)}
    greedy = SamplingParams(temperature=0.0, **few)  # type: ignore[arg-type]
    sampled = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.4, logprobs=2, **few)  # type: ignore[arg-type]
    return [answer.text for params in (greedy, sampled) for answer in reference.generate(PROMPTS, params)]


def texts(cluster: Cluster) -> list[str]:
    """Of all prompts at once, streamed; log-probabilities fit the tokens."""

    def ask(asked: tuple[str, dict[str, Any]]) -> str:
        prompt, options = asked
        text = ""
        for chunk in cluster.client().completions.create(model="dry-run", prompt=prompt, stream=True, **options):
            for choice in chunk.choices:
                text += choice.text
                if "logprobs" in options and choice.text:
                    assert len(choice.logprobs.token_logprobs) == len(choice.text)
        return text

    asked = [(prompt, options) for options in (GREEDY, SAMPLED) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as pool:
        return [*pool.map(ask, asked)]


def test_drafts_change_no_answer(reference: LLM) -> None:
    """Nor do drafts that two ranks verify; one rank's are those of the next test."""
    [port] = free_ports(1)
    with running_cluster(
        engine_args=(*ENGINE, *DRAFTS), role_args={"decode": ["--tp=2", f"--metrics-port={port}"]}
    ) as cluster:
        assert texts(cluster) == expected_texts(reference)
        cluster.wait_quiet()
        drafted, accepted = (
            metric(f"http://127.0.0.1:{port}", rf"vllm:spec_decode_num_{kind}_tokens_total{{.*}}")
            for kind in ("draft", "accepted")
        )
        assert 60 < accepted < drafted


@pytest.fixture(scope="module")
def eagle_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the dry-run model: a third of its drafts is right, of three tokens to choose from."""
    size, vocab_size = DRY_RUN_CONFIG.hidden_size, DRY_RUN_CONFIG.vocab_size
    changes = {"hidden_size": size, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    head = RandomHead(changes, draft_vocab=0, vocab_size=vocab_size, model_size=size)
    return head.save(tmp_path_factory.mktemp("eagle"))


@pytest.mark.parametrize("method", [pytest.param("suffix", marks=pytest.mark.soak), "eagle"])
def test_a_stream_moves_to_another_worker_with_its_drafts(method: str, reference: LLM, eagle_head: Path) -> None:
    """Rejection sampling leaves answers with a temperature of 0, or with a seed, as they are."""
    if method == "eagle":
        method = f"eagle:{eagle_head} --speculative-sampling=rejection"
    params = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True, allowed_token_ids=(97, 98, 99))
    [expected] = reference.generate(PROMPTS[1], params)
    with running_cluster(
        num_decode=2, engine_args=(*ENGINE, *f"--speculative={method}".split(), "--no-adaptive-drafts")
    ) as cluster:
        assert texts(cluster) == expected_texts(reference)
        for _ in range(10):  # it may end before its worker does
            answer = ask_and_kill(cluster)
            assert answer.choices[0].text == expected.text
            [choice] = cluster.get(f"/explain/{answer.id}")["choices"]
            if choice["migrations"]:
                assert choice["migrations"] == 1
                assert 0 < choice["accepted_draft_tokens"] <= choice["draft_tokens"]
                return
            cluster.wait_ready(3)
    pytest.fail("no stream moved")


def ask_and_kill(cluster: Cluster) -> openai.types.Completion:
    """The answer to a request whose decode worker got SIGKILL, and was started again."""
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(cluster.ask, PROMPTS[1], 1500, allowed_token_ids=[97, 98, 99])
        while not answer.done():
            if busy := [w["id"] for w in cluster.get("/v1/cluster")["workers"] if is_decoding(w)]:
                cluster.services[busy[0]].kill()
                answer.exception()  # wait for it
                cluster.start_service(busy[0])
        return answer.result()


def is_decoding(worker: dict[str, dict[str, int]]) -> bool:
    return str(worker["id"]).startswith("decode") and worker["load"]["running"] > 0
