"""Metrics of prompts that are pulled while they are computed."""

from __future__ import annotations

from common.metrics import counter

OUTCOMES = ("pulled", "skipped", "failed")
"""skipped: no room, or the prefix cache has its blocks, or lacks those before them."""
METRICS = (
    counter(
        "mini_infer_kv_prefetches",
        "Offers of a prompt's KV while the rest is computed",
        "outcome",
        values=OUTCOMES,
    ),
    counter("mini_infer_kv_prefetched_tokens", "Prompt tokens whose KV was pulled while the rest was computed"),
)
