from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.sampling import (
    CHUNK,
    NOT_FINITE,
    NOTHING_ALLOWED,
    choose_tokens,
    chunk_stats,
    num_chunks_of,
)
from kernels.gumbel import exponential_noise, noise_key

VOCAB = CHUNK + 904


def stats_for(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    return torch.empty(num_rows, num_chunks_of(vocab_size), 4, device=device)


def sample_reference(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """Sample from one row (vocab,), by sorting."""
    row = logits.float()
    if temperature <= 0:
        return int(row.argmax())
    scaled = (row - row.max()) / max(temperature, 1e-5)
    ordered = scaled.sort(descending=True).values
    threshold = ordered[top_k - 1] if 0 < top_k < len(row) else ordered[-1]
    mass = torch.where(ordered >= threshold, ordered.exp(), 0.0).double()
    if top_p < 1.0:
        before = mass.cumsum(0) - mass
        kept = before < top_p * mass.sum()
        kept[0] = True
        threshold = torch.maximum(threshold, ordered[kept].min())
    if min_p > 0.0:
        threshold = torch.maximum(threshold, ordered[ordered.exp() >= min_p].min())
    keys = torch.tensor([noise_key(seed, position)], dtype=torch.int32)
    noise = exponential_noise(keys, torch.arange(len(row), dtype=torch.int32)[None])[0].to(row.device)
    return int((scaled - noise.log()).masked_fill(scaled < threshold, float("-inf")).argmax())


def sample(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, seeds: Tensor,
    positions: Tensor, stats: Tensor, token_ids: Tensor, last_tokens: Tensor | None = None,
) -> None:  # fmt: skip
    """Run both kernels, as a GPU does that has all logits."""
    chunk_stats(logits, temperatures, seeds, positions, stats, logits.shape[1])
    choose_tokens(
        logits, stats, temperatures, top_ks, top_ps, min_ps, seeds, positions, token_ids, last_tokens
    )  # fmt: skip


def draw(
    logits: Tensor, parameters: list[tuple[float, int, float, float]], seeds: list[int], positions: list[int]
) -> list[int]:
    device = logits.device
    temperatures, top_ks, top_ps, min_ps = zip(*parameters, strict=True)
    workspace = stats_for(len(seeds), logits.shape[1], device)
    token_ids = torch.full((len(seeds),), -7, dtype=torch.int64, device=device)
    sample(
        logits, torch.tensor(temperatures, device=device), torch.tensor(top_ks, dtype=torch.int32, device=device),
        torch.tensor(top_ps, device=device), torch.tensor(min_ps, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device), torch.tensor(positions, device=device),
        workspace, token_ids,
    )  # fmt: skip
    return token_ids.tolist()


@pytest.mark.parametrize(
    "parameters",
    [
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.3, 0, 1.0, 0.2),
        (1.0, 50, 0.8, 0.0), (2.0, 100, 0.5, 0.01), (1e-4, 0, 0.9, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.0, 0.0),
        (1.0, 3, 0.99, 0.0), (1.0, 10**6, 0.3, 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_the_token_of_the_reference(
    parameters: tuple[float, int, float, float], dtype: torch.dtype, device: torch.device
) -> None:
    logits = (torch.randn(4, VOCAB, device=device) * 3).to(dtype)
    seeds, positions = [0, 1, 2**63 - 5, -3], [0, 5, 123456, 77]
    drawn = draw(logits, [parameters] * 4, seeds, positions)
    for row in range(4):
        assert drawn[row] == sample_reference(logits[row], *parameters, seeds[row], positions[row])


def test_flat_rows_are_drawn_in_proportion(device: torch.device) -> None:
    """A top-k of 8 among 4 distinct levels: tied tokens are all kept, others never drawn."""
    logits = torch.arange(4.0, device=device).repeat_interleave(16)[None].expand(48, -1).contiguous()
    drawn = draw(logits, [(1.0, 8, 1.0, 0.0)] * 48, list(range(48)), [3] * 48)
    assert all(token >= 48 for token in drawn)
    assert len(set(drawn)) > 8


def test_rows_of_different_kinds_share_a_batch(device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.5, 9, 0.5, 0.1)]
    drawn = draw(logits, kinds, [9] * 4, [1] * 4)
    assert drawn == [sample_reference(logits[row], *kinds[row], 9, 1) for row in range(4)]


def test_forbidden_tokens_and_broken_rows(device: torch.device) -> None:
    logits = torch.full((3, VOCAB), float("-inf"), device=device)
    logits[0, VOCAB - 1] = -2.0
    logits[2] = torch.randn(VOCAB)
    logits[2, 17] = float("nan")
    drawn = draw(logits, [(1.0, 4, 0.5, 0.1)] * 3, [1, 2, 3], [1, 2, 3])
    assert drawn == [VOCAB - 1, NOTHING_ALLOWED, NOT_FINITE]


def test_infinite_logits_are_broken_and_large_ones_are_not(device: torch.device) -> None:
    logits = torch.randn(2, 300, device=device)
    logits[0, 9], logits[1, 8] = float("inf"), 1e20
    assert draw(logits, [(0.0, 0, 1.0, 0.0)] * 2, [0, 0], [1, 1]) == [NOT_FINITE, 8]


def test_last_tokens_of_rows_in_use_are_kept(device: torch.device) -> None:
    """Row 1 is not in use, row 2 is broken."""
    logits = torch.zeros(3, 300, device=device)
    logits[:, 40], logits[2, 7] = 1.0, float("inf")
    zeros, ones = torch.zeros(3, device=device), torch.ones(3, device=device)
    last_tokens = torch.tensor([5, 6, 7], device=device)
    token_ids = torch.empty(3, dtype=torch.int64, device=device)
    sample(
        logits, zeros, zeros.int(), ones, zeros, zeros.long(), torch.tensor([3, 0, 3], device=device),
        stats_for(3, 300, device), token_ids, last_tokens,
    )  # fmt: skip
    assert token_ids.tolist() == [40, 40, -1]
    assert last_tokens.tolist() == [40, 6, 7]


def test_ties_of_greedy_rows_go_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB, device=device)
    logits[0, [100, CHUNK + 3, 50]] = 1.0
    assert draw(logits, [(0.0, 0, 1.0, 0.0)], [0], [0]) == [50]


def test_a_workspace_of_other_size_is_refused(device: torch.device) -> None:
    vector = torch.zeros(2, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        sample(
            torch.zeros(2, 64, device=device), vector, vector, vector, vector, vector, vector,
            stats_for(1, 64, device), vector,
        )  # fmt: skip
