from __future__ import annotations

import pytest
import torch

from kernels.gpu.moe_routing import route_softmax
from tests.kernels.helpers import HALF_DTYPE


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (12, 3), (128, 8)])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF_DTYPE])
def test_equals_softmax_and_topk(
    num_experts: int, top_k: int, normalizes: bool, dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.stack([torch.randperm(num_experts) * 0.0625 for _ in range(5)]).to(device).to(dtype)  # no ties
    shares, chosen = route_softmax(logits, top_k, normalizes)
    expected, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalizes:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    assert torch.equal(chosen.long(), experts)
    torch.testing.assert_close(shares, expected, rtol=2e-6, atol=0.0)


def test_of_equal_logits_the_first_are_taken_and_none_twice(device: torch.device) -> None:
    shares, chosen = route_softmax(torch.zeros(2, 6, device=device), 4, True)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert shares.tolist() == [[0.25] * 4] * 2
