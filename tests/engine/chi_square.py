"""Pearson's chi-square test, as far as tests of samplers need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LEAST_EXPECTED = 5.0  # of a cell; rarer ones are counted as one


def fits(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Return the p-value of counts under these probabilities; 0 if an impossible outcome was counted."""
    total = sum(counts)
    cells, rare = [], [0.0, 0.0]
    for count, probability in zip(counts, probabilities, strict=True):
        if not probability and count:
            return 0.0
        if probability * total >= LEAST_EXPECTED:
            cells.append((float(count), probability * total))
        else:
            rare[0] += count
            rare[1] += probability * total
    if rare[1] >= LEAST_EXPECTED:
        cells.append((rare[0], rare[1]))
    return _tail(sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1)


def fit_together(counts: Sequence[int], others: Sequence[int]) -> float:
    """Return the p-value of the hypothesis that two samples come from one distribution."""
    total, other_total = sum(counts), sum(others)
    statistic, num_cells = 0.0, 0
    for count, other in zip(counts, others, strict=True):
        share = (count + other) / (total + other_total)
        expected, expected_other = share * total, share * other_total
        if min(expected, expected_other) >= LEAST_EXPECTED:
            statistic += (count - expected) ** 2 / expected + (other - expected_other) ** 2 / expected_other
            num_cells += 1
    return _tail(statistic, num_cells - 1)


def _tail(statistic: float, degrees: int) -> float:
    if degrees <= 0:
        return 1.0
    halves = torch.tensor([degrees, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(halves[0], halves[1]))
