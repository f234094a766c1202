"""A picture of a run: distributions of TTFT and ITL, and tokens per second over time. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.client.event_stream import RequestRecord
from common.errors import ConfigError


def tokens_over_time(records: Sequence[RequestRecord], bin_seconds: float) -> list[float]:
    """Return output tokens per second in consecutive bins. A request's tokens are spread evenly over its chunks."""
    chunks = [
        (time, record.num_output_tokens / len(record.chunk_times))
        for record in records
        for time in record.chunk_times
    ]
    if not chunks:
        return []
    bins = [0.0] * (math.floor(max(time for time, _ in chunks) / bin_seconds) + 1)
    for time, tokens in chunks:
        bins[math.floor(time / bin_seconds)] += tokens / bin_seconds
    return bins


def plot(records: Sequence[RequestRecord], path: Path, title: str) -> None:
    """Write the picture to `path`. Raises ConfigError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [record for record in records if not record.error and record.chunk_times]
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    figure.suptitle(title)
    axes: list[Any] = list(figure.subplots(1, 3))
    _cumulative(axes[0], "time to first token (ms)", [record.ttft * 1e3 for record in done])
    _cumulative(axes[1], "time between chunks (ms)", [gap * 1e3 for record in done for gap in record.gaps])
    bin_seconds = 1.0
    rates = tokens_over_time(done, bin_seconds)
    axes[2].step([bin_seconds * number for number in range(len(rates))], rates, where="post")
    axes[2].set(xlabel="time (s)", ylabel="output tokens / s")
    axes[2].set_ylim(bottom=0)
    try:
        FigureCanvasAgg(figure).print_figure(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def _cumulative(axis: Any, label: str, values: list[float]) -> None:
    ordered = sorted(values)
    axis.step(ordered, [(number + 1) / len(ordered) for number in range(len(ordered))], where="post")
    axis.set(xlabel=label, ylabel="share of all", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
