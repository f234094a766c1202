"""Metrics of expert balancing."""

from __future__ import annotations

from common.metrics import counter, gauge

METRICS = (
    gauge(
        "mini_infer_expert_balancedness",
        "Tokens of the mean rank over those of the one with the most, where experts are counted: 1 is best",
    ),
    counter("mini_infer_expert_tokens", "Choices of experts by tokens, by the rank that has the expert", "rank"),
    counter("mini_infer_expert_placements", "Layers whose experts have been placed anew while serving"),
)
