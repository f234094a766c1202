"""Metrics of drafts."""

from __future__ import annotations

from common.metrics import counter

METRICS = (
    counter("vllm:spec_decode_num_drafts", "Rows of steps that had draft tokens"),
    counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were computed"),
    counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted"),
    counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their position", "position"),
)
