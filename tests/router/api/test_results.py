"""Which choices best_of keeps."""

from __future__ import annotations

from protos import types_pb2 as pb
from router.api.results import ChoiceResult, best_results


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
