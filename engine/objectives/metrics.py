"""Metrics of steps under latency objectives."""

from __future__ import annotations

from common.metrics import histogram

_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0, 8.0)
METRICS = (
    histogram(
        "mini_infer_step_seconds_over_predicted",
        "Duration of a step with prompts and decode rows, as a multiple of what the ITL objective assumed",
        _RATIOS,
    ),
)
