"""Log-probabilities of a prompt that is computed in chunks, on the GPU engine and on the plain one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import GpuConfig
from engine.engine import Engine
from engine.request import SamplingParams, TokenLogprobs
from tests.gpu.models import save_tiny_model
from tests.gpu.test_engine import PROMPTS, assert_same_logprobs, open_gpu, reference


def prompt_logprobs(made: Engine) -> list[list[TokenLogprobs]]:
    found: dict[object, list[TokenLogprobs]] = {}
    for number, prompt in enumerate(PROMPTS):
        wanted = number if number != 3 else None  # one request does not ask
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=wanted)
        found[made.add_request(prompt, params)] = []
    while made.has_work():
        for output in made.step().outputs:
            found[output.request] += output.prompt_logprobs
    return list(found.values())


@pytest.mark.parametrize("tokens_per_step", [16, 64])
def test_equal_those_of_the_plain_engine(
    tokens_per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path)
    expected = prompt_logprobs(reference(model))
    made, _ = open_gpu(model, monkeypatch, GpuConfig(), max_num_batched_tokens=tokens_per_step)
    found = prompt_logprobs(made)
    assert [len(entries) for entries in found] == [len(PROMPTS[0]) - 1, len(PROMPTS[1]) - 1, len(PROMPTS[2]) - 1, 0]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_logprobs(ours, theirs)
