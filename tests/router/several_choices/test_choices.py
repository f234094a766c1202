"""Parameters of a request's choices."""

from __future__ import annotations

import pytest

from protos import types_pb2 as pb
from router.api.sampling import sampling_params
from router.api.schemas import ChatCompletionBody, Message
from router.several_choices.request import for_choice
from router.workers.model_workers import ModelLimits


def test_choices_get_consecutive_seeds_that_wrap() -> None:
    params = pb.SamplingParams(seed=(1 << 64) - 1)
    assert for_choice(params, 0) is params
    assert for_choice(params, 2).seed == 1
    assert params.seed == (1 << 64) - 1


@pytest.mark.parametrize("seed", [None, 0, 5, -1])
def test_workers_know_whether_the_client_chose_the_seed(seed: int | None) -> None:
    """This holds for all choices: an answer whose seed nobody knows need not be reproducible."""
    limits = ModelLimits(max_model_len=200, vocab_size=200)
    params = sampling_params(ChatCompletionBody(messages=[Message(role="user", content="x")], seed=seed), limits, 1)
    for index in range(2):
        assert for_choice(params, index).seed_is_drawn is (seed is None)
