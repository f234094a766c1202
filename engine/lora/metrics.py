"""Metrics of LoRA adapters."""

from __future__ import annotations

from common.metrics import counter, gauge, histogram

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
METRICS = (
    gauge("mini_infer_lora_adapters", "Adapters in memory, those included that are being read"),
    counter("mini_infer_lora_loads", "Adapters that were read from their folders"),
    histogram("mini_infer_lora_load_seconds", "Reading of an adapter", SECONDS),
)
