"""Choices of one request: their parameters, and which of them best_of keeps."""

from __future__ import annotations

import pytest

from protos import types_pb2 as pb
from router.api.completion_renderer import best_results
from router.api.sampling import for_choice, sampling_params
from router.api.schemas import CompletionBody
from router.api.text import ChoiceResult
from router.workers.model_workers import ModelLimits


def test_choices_get_consecutive_seeds_that_wrap() -> None:
    params = pb.SamplingParams(seed=(1 << 64) - 1)
    assert for_choice(params, 0) is params
    assert for_choice(params, 2).seed == 1
    assert params.seed == (1 << 64) - 1


@pytest.mark.parametrize("seed", [None, 0, 5, -1])
def test_workers_know_whether_the_client_chose_the_seed(seed: int | None) -> None:
    """For all choices: an answer of which nobody has the seed need not come again."""
    limits = ModelLimits(max_model_len=200, vocab_size=200)
    params = sampling_params(CompletionBody(prompt="x", n=2, seed=seed), limits, 1)
    for index in range(2):
        assert for_choice(params, index).seed_is_drawn is (seed is None)


def test_best_of_picks_per_prompt_and_numbers_anew() -> None:
    def result(index: int, prompt: int, logprob: float) -> ChoiceResult:
        return ChoiceResult(index, prompt, logprobs=[pb.TokenLogprobs(logprob=logprob)])

    results = [result(0, 0, -3), result(1, 0, -1), result(2, 1, -1), result(3, 1, -2)]
    best = best_results(results, 1)
    assert [(item.index, item.prompt_index, item.logprobs[0].logprob) for item in best] == [(0, 0, -1), (1, 1, -1)]


def test_a_choice_whose_time_was_over_before_its_first_token_is_not_the_best() -> None:
    results = [ChoiceResult(0), ChoiceResult(1, logprobs=[pb.TokenLogprobs(logprob=-5)])]
    (best,) = best_results(results, 1)
    assert best.logprobs
