"""Cells of `benchmarks.clusters.roles`: one cluster under one load each, as JSON, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """A load to send. rate 0: a closed loop."""

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
    first_gap_ms: dict[str, float] | None = None  # between first and second token, so it includes a hand-off
    queue_ms: float = 0.0  # mean from arrival at a worker to the first step, and below from there to the first token
    prefill_ms: float = 0.0  # as workers measure them
    step_seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # by worker, for each part of a step


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


def _p99(times_ms: dict[str, float] | None) -> float | None:
    return times_ms["p99"] if times_ms else None


def draw(cells: Sequence[Cell], path: Path, title: str, ttft_objective_ms: float, itl_objective_ms: float) -> None:
    """Draw good requests, and p99 of TTFT and gaps, under each load with a rate. Raises ConfigError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    cells = [cell for cell in cells if cell.rate]
    loads = list(dict.fromkeys(Load(cell.load, cell.rate) for cell in cells))
    if not loads:
        raise ConfigError("--plot: no load with rates was measured")
    panels: Sequence[tuple[str, float | None, Sequence[float | None]]] = (
        ("requests within both objectives", None, [cell.good_fraction for cell in cells]),
        ("time to first token, p99 (ms)", ttft_objective_ms, [_p99(cell.ttft_ms) for cell in cells]),
        ("gap between tokens, p99 (ms)", itl_objective_ms, [_p99(cell.itl_ms) for cell in cells]),
    )
    clusters = list(dict.fromkeys(cell.cluster for cell in cells))
    with matplotlib.rc_context({"svg.hashsalt": "cluster", "svg.fonttype": "none"}):
        figure = Figure(figsize=(15, 4.2), layout="constrained")
        figure.suptitle(title)
        all_axes: Any = figure.subplots(1, len(panels))
        for axes, (label, objective, values) in zip(all_axes, panels, strict=True):
            for index, cluster in enumerate(clusters):
                offset = 0.8 * (index + 0.5) / len(clusters) - 0.4
                own = {
                    loads.index(Load(cell.load, cell.rate)) + offset: value
                    for cell, value in zip(cells, values, strict=True)
                    if cell.cluster == cluster and value is not None
                }
                bars = axes.bar(list(own), list(own.values()), 0.75 / len(clusters), label=cluster)
                axes.bar_label(bars, fmt="{:.0%}" if objective is None else "{:,.0f}", padding=2, fontsize=8)
            if objective is not None:
                axes.axhline(objective, color="black", linestyle="--", label=f"objective: {objective:,.0f} ms")
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:,.0f}")
            else:
                axes.yaxis.set_major_formatter("{x:.0%}")
            axes.set_xticks(range(len(loads)), [load.title for load in loads])
            axes.set_ylabel(label)
            axes.margins(y=0.1)
            axes.grid(alpha=0.3, axis="y")
            axes.set_axisbelow(True)
        all_axes[-1].legend(fontsize=8)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
