"""Summarizes the records of single requests: percentiles, throughput, goodput. Pure.

TTFT: request sent to first chunk. ITL: gap between two chunks of one request. TPOT: time after the first token
divided by the tokens after it. E2E: request sent to last byte. Goodput: requests per second that met all objectives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.client.event_stream import RequestRecord

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Objectives:
    """A request is good if its TTFT and the 99th percentile of its gaps are below these; 0: no objective."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0

    def met_by(self, record: RequestRecord) -> bool:
        if record.error or not record.chunk_times:
            return False
        if self.ttft_ms and record.ttft * 1e3 > self.ttft_ms:
            return False
        return not (self.itl_ms and record.gaps and percentile(record.gaps, 0.99) * 1e3 > self.itl_ms)


def percentile(values: Sequence[float], quantile: float) -> float:
    """Interpolate linearly between the closest ranks, as numpy does by default. `values` must not be empty."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * quantile
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution_ms(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles of seconds in milliseconds; None without values."""
    if not values:
        return None
    shown = {"mean": sum(values) / len(values) * 1e3}
    for quantile in QUANTILES:
        shown[f"p{quantile * 100:g}"] = percentile(values, quantile) * 1e3
    return shown | {"max": max(values) * 1e3}


def summarize(records: Sequence[RequestRecord], duration_seconds: float, objectives: Objectives) -> dict[str, Any]:
    """Return all figures of a report as plain JSON values. `duration_seconds`: first send to last byte."""
    done = [record for record in records if not record.error]
    streamed = [record for record in done if record.chunk_times]
    duration = max(duration_seconds, 1e-9)
    prompt_tokens = sum(record.num_prompt_tokens for record in done)
    output_tokens = sum(record.num_output_tokens for record in done)
    num_good = sum(objectives.met_by(record) for record in records)
    return {
        "num_requests": len(records),
        "num_completed": len(done),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "first_error_message": next((record.message for record in records if record.message), ""),
        "duration_seconds": duration_seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(record.num_cached_tokens for record in done),
        "output_tokens": output_tokens,
        "requests_per_second": len(done) / duration,
        "input_tokens_per_second": prompt_tokens / duration,
        "output_tokens_per_second": output_tokens / duration,
        "ttft_ms": distribution_ms([record.ttft for record in streamed]),
        "itl_ms": distribution_ms([gap for record in streamed for gap in record.gaps]),
        "tpot_ms": distribution_ms([tpot for record in streamed if (tpot := record.tpot) is not None]),
        "e2e_ms": distribution_ms([record.e2e for record in done]),
        "send_delay_ms": distribution_ms([record.sent - record.scheduled for record in records]),
        "slo": {"ttft_ms": objectives.ttft_ms, "itl_ms": objectives.itl_ms},
        "good_requests_per_second": num_good / duration,
        "good_fraction": num_good / len(records) if records else 0.0,
    }
