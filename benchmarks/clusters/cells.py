"""Cells of `benchmarks.clusters.roles`, one cluster under one load each: as JSON, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """What is sent. rate 0: a closed loop."""

    name: str
    rate: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.name} {self.rate:g}/s" if self.rate else self.name


@dataclass
class Cell:
    """One cluster under one load."""

    cluster: str
    load: str
    rate: float
    output_tokens_per_second: float
    good_per_second: float
    good_fraction: float
    ttft_ms: dict[str, float] | None
    itl_ms: dict[str, float] | None
    placements: dict[str, float] = field(default_factory=dict)  # in this cell, and moves
    num_requests: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    first_gap_ms: dict[str, float] | None = None  # between a request's first and second token: of a hand-off, too


def row(cell: Cell) -> str:
    def ms(values: dict[str, float] | None, name: str) -> str:
        return f"{values[name]:8.1f}" if values else "       -"

    placed = " ".join(f"{name} {count:.0f}" for name, count in cell.placements.items() if count)
    failed = " ".join(f"{count} x {kind}" for kind, count in cell.errors.items())
    return (
        f"{Load(cell.load, cell.rate).title:16} {cell.cluster:11} {cell.output_tokens_per_second:8.0f} "
        f"{cell.good_per_second:7.2f} {cell.good_fraction:6.1%} {ms(cell.ttft_ms, 'p50')} {ms(cell.ttft_ms, 'p99')} "
        f"{ms(cell.itl_ms, 'p50')} {ms(cell.itl_ms, 'p99')} {ms(cell.first_gap_ms, 'p50')}  {placed} {failed}"
    )


COLUMNS = ("ttft50", "ttft99", "itl50", "itl99", "2nd50")
HEADER = f"{'load':16} {'cluster':11} {'tok/s':>8} {'good/s':>7} {'good':>6} " + " ".join(f"{c:>8}" for c in COLUMNS)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Goodput, p99 of TTFT and of gaps over the rate, one row of pictures for each trace. Raises ConfigError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    names = list(dict.fromkeys(cell.load for cell in cells if cell.rate))
    if not names:
        raise ConfigError("--plot: no load with rates was measured")
    figure = Figure(figsize=(15, 4.2 * len(names)), layout="constrained")
    all_axes: Any = figure.subplots(len(names), 3, squeeze=False)
    for name, axes in zip(names, all_axes, strict=True):
        for cluster in dict.fromkeys(cell.cluster for cell in cells):
            own = sorted((c for c in cells if (c.load, c.cluster) == (name, cluster)), key=lambda c: c.rate)
            rates = [cell.rate for cell in own]
            axes[0].plot(rates, [cell.good_per_second for cell in own], marker="o", label=cluster)
            for axis, values in ((axes[1], [c.ttft_ms for c in own]), (axes[2], [c.itl_ms for c in own])):
                axis.plot(rates, [v["p99"] if v else None for v in values], marker="o", label=cluster)
        labels = ("goodput (requests/s)", "TTFT p99 (ms)", "ITL p99 (ms)")
        for axis, label in zip(axes, labels, strict=True):
            axis.set(xlabel=f"{name} (requests/s)", ylabel=label, yscale="linear" if axis is axes[0] else "log")
            axis.grid(alpha=0.3)
            axis.legend()
    FigureCanvasAgg(figure).print_figure(path, dpi=110)
