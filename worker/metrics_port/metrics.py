"""Metrics of a worker, in addition to those of the engine's wings: names, kinds and label sets."""

from __future__ import annotations

from common.metrics import counter, gauge, histogram

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_TRANSFER = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

METRICS = (
    gauge("vllm:num_requests_running", "Requests that take part in steps"),
    gauge("vllm:num_requests_waiting", "Requests that wait for their first step"),
    gauge("vllm:num_requests_swapped", "Requests whose KV lies in host memory"),
    gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1"),
    counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    counter("vllm:num_preemptions", "Requests taken out of the running batch"),
    histogram("vllm:iteration_tokens_total", "Tokens in one engine step", _STEP_TOKENS),
    histogram("mini_infer_step_seconds", "Duration of an engine step", _STEP_SECONDS),
    counter("mini_infer_step_tokens", "Tokens that steps computed: of prompts, or of outputs", "phase"),
    gauge("mini_infer_kv_blocks", "KV blocks by state", "state"),
    gauge("mini_infer_kv_leases", "Leases held on blocks of this worker"),
    gauge("mini_infer_kv_loading", "Requests whose KV is being pulled"),
    counter("mini_infer_kv_transfers", "KV pulls from peers", "transport"),
    counter("mini_infer_kv_transfer_bytes", "KV bytes pulled from peers", "transport"),
    counter("mini_infer_kv_transfer_failures", "KV pulls that failed; the prompt was recomputed", "transport"),
    histogram("mini_infer_kv_transfer_seconds", "Duration of a KV pull", _TRANSFER, "transport"),
    gauge("mini_infer_draining", "1 while this worker drains"),
)
