"""Parameters of the choices of one request."""

from __future__ import annotations

from protos import types_pb2 as pb
from router.api.sampling import for_choice


def test_choices_get_consecutive_seeds_that_wrap() -> None:
    params = pb.SamplingParams(seed=(1 << 64) - 1)
    assert for_choice(params, 0) is params
    assert for_choice(params, 2).seed == 1
    assert params.seed == (1 << 64) - 1
