"""Which rows of a step go to the host's sampler, and that log-probabilities come back with a step's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.gpu.config import GpuConfig
from engine.request import SamplingParams, TokenLogprobs
from tests.gpu.models import save_tiny_model
from tests.gpu.test_engine import PROMPTS, assert_same_logprobs, generate, open_gpu, reference

PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=5, temperature=1.0, seed=2, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True, presence_penalty=0.7, logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.8, seed=4, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def run(made: Engine) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Tokens and log-probabilities of each request."""
    requests = [made.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    found: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    while made.has_work():
        for output in made.step():
            assert output.error is None
            found[output.request.request_id] += output.logprobs
    return [(request.output_token_ids, found[request.request_id]) for request in requests]


def test_logprobs_of_overlapped_steps_equal_those_of_the_plain_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(reference(model))
    made, _ = open_gpu(model, monkeypatch, GpuConfig())
    for (tokens, entries), (other_tokens, others) in zip(run(made), want, strict=True):
        assert tokens == other_tokens
        assert_same_logprobs(entries, others)


def test_only_rows_with_changed_logits_go_to_the_host(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = open_gpu(model, monkeypatch, GpuConfig())
    sample, asked = runner._samples._on_host.sample, []

    def counted(logits: Any, requests: Any, positions: Any, hooks: Any) -> Any:
        asked.append([request.params for request in requests])
        return sample(logits, requests, positions, hooks)

    monkeypatch.setattr(runner._samples._on_host, "sample", counted)
    generate(made, PARAMS)
    assert asked == [[PARAMS[2]]] * PARAMS[2].max_tokens
