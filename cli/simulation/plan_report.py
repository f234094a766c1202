"""The results of `mini-infer plan`: a table, a picture, a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.simulation.divisions import Division
from common.errors import ConfigError

PAYS = 1.05  # a division must be better by this factor to be worth its transfers


@dataclass(frozen=True)
class Found:
    """The highest rate of a division, and the summary at that rate; rate 0: none is good enough."""

    division: Division
    scale: float  # multiple of the load's own rate
    summary: dict[str, Any]
    curve: list[tuple[float, float]] = field(default_factory=list)  # scales tried, with the share of good requests

    @property
    def rate(self) -> float:
        return float(self.summary["good_requests_per_second"]) if self.scale else 0.0


def described(found: Found) -> dict[str, Any]:
    return {
        "division": found.division.name, "kind": found.division.kind, "prefill_workers": found.division.num_prefill,
        "decode_workers": found.division.num_decode, "prefill_tp": found.division.prefill_tp,
        "decode_tp": found.division.decode_tp, "scale": found.scale, "good_requests_per_second": found.rate,
        "at_that_rate": found.summary, "curve": found.curve,
    }  # fmt: skip


def show(found: Sequence[Found], console: Console) -> None:
    """Print the divisions, best first, each with a bar, and the advice."""
    table = Table("prefill + decode", "good/s", "", "TTFT p50 p99", "gaps p50 p99", "tok/s")
    for column in table.columns:
        column.no_wrap = True
    best = max(found[0].rate, 1e-9)
    for each in found:
        if not each.scale:
            table.add_row(each.division.name, "none")
            continue
        ttft, itl = each.summary["ttft_ms"], each.summary["itl_ms"] or {"p50": 0.0, "p99": 0.0}
        table.add_row(
            each.division.name, f"{each.rate:.2f}", "█" * max(round(12 * each.rate / best), 1),
            f"{ttft['p50']:.0f} {ttft['p99']:.0f} ms", f"{itl['p50']:.1f} {itl['p99']:.1f} ms",
            f"{each.summary['output_tokens_per_second']:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print(advice(found), highlight=False, soft_wrap=True)


def advice(found: Sequence[Found]) -> str:
    """Return one sentence on the best division, and whether dividing pays."""
    best = found[0]
    if not best.scale:
        return "No division meets the objectives: loosen them, or take more or faster GPUs."
    together = next(each for each in found if each.division.kind == "aggregated")  # the best aggregated division
    if best.rate < PAYS * together.rate:
        how = f", by workers of TP {tp}" if (tp := together.division.decode_tp) > 1 else ""
        return (
            f"Let all GPUs do both{how}: {together.rate:.2f} good requests/s, and dividing them brings less than 5%."
        )
    served = f"Divide them: {best.division.name} serves {best.rate:.2f} good requests/s"
    if not together.scale:
        return f"{served}, and GPUs that do both serve too few well."
    return f"{served}, {best.rate / together.rate:.2f} times the {together.rate:.2f} of GPUs that do both."


def draw(found: Sequence[Found], path: Path) -> None:
    """Draw the share of good requests over the load. Raises ConfigError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes: Any = figure.subplots()
    for each in found:
        axes.plot(*zip(*each.curve, strict=True), marker="o", markersize=3, label=each.division.name)
    axes.set(xlabel="multiple of the load's own rate", ylabel="share of good requests", xscale="log", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        FigureCanvasAgg(figure).print_figure(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error}") from error
