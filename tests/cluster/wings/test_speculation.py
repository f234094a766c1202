"""Speculation through HTTP: the answers of an engine without it, several tokens in one event, and its metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.loader.random_weights import DRY_RUN_CONFIG
from mini_infer import LLM, SamplingParams
from tests.engine.speculation.eagle.heads import RandomHead
from tests.harness.cluster import Cluster, free_ports, metric, running_cluster

ENGINE = ("--model=dry-run", "--num-gpu-blocks=256", "--quant-mode=none")
PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 5, "x" * 400]
# Few tokens to choose from, so that answers repeat themselves and are drafted.
GREEDY = {"max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True, "allowed_token_ids": [97, 98, 99]}}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 5, "presence_penalty": 0.4, "logprobs": 2}


def expected_texts(reference: LLM) -> list[str]:
    few = {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": (97, 98, 99)}
    greedy = SamplingParams(temperature=0.0, **few)  # type: ignore[arg-type]
    sampled = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.4, logprobs=2, **few)  # type: ignore[arg-type]
    return [answer.text for params in (greedy, sampled) for answer in reference.generate(PROMPTS, params)]


def texts(cluster: Cluster) -> list[str]:
    """Stream all prompts at once; return their texts. Checks that log-probabilities fit the tokens."""

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


def test_drafts_change_no_answer(reference: LLM, tmp_path: Path) -> None:
    """Nor do a head's drafts that two ranks verify: a third is right, with three tokens to choose from."""
    size, vocab_size = DRY_RUN_CONFIG.hidden_size, DRY_RUN_CONFIG.vocab_size
    changes = {"hidden_size": size, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    head = RandomHead(changes, draft_vocab=0, vocab_size=vocab_size, model_size=size).save(tmp_path / "head")
    drafts = (f"--speculative=eagle:{head}", "--no-adaptive-drafts")
    [port] = free_ports(1)
    with running_cluster(
        engine_args=(*ENGINE, *drafts), role_args={"decode": ["--tp=2", f"--metrics-port={port}"]}
    ) as cluster:
        assert texts(cluster) == expected_texts(reference)
        cluster.wait_quiet()
        drafted, accepted = (
            metric(f"http://127.0.0.1:{port}", rf"vllm:spec_decode_num_{kind}_tokens_total{{.*}}")
            for kind in ("draft", "accepted")
        )
        assert 60 < accepted < drafted
