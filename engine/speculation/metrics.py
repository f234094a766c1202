"""Metrics of drafts."""

from __future__ import annotations

from common.metrics import counter

METRICS = (
    counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed by speculation"),
    counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted"),
)
