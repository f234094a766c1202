"""Metrics of what a worker gives its host tier and gets back; the node agent has its own."""

from __future__ import annotations

from common.metrics import counter

METRICS = (
    counter("mini_infer_host_tier_hit_tokens", "Prompt tokens whose KV came back from the host tier"),
    counter("mini_infer_host_tier_stored_blocks", "Evicted blocks that the host tier took"),
)
