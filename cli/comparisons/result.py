"""The result of a comparison, and how a terminal shows it: a number, a bar and one sentence. Pure.

The numbers decide the sentence: a factor below NOISE counts as no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NOISE = 1.1  # factor by which two equal runs may differ on a machine with other load
BAR_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Arm:
    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """arms: the one without the optimization comes first. less_is_better: the values are times."""

    title: str
    unit: str
    arms: Sequence[Arm]
    sentence: str
    less_is_better: bool = False


def gain(without: float, value: float, less_is_better: bool = False) -> float:
    """Return how many times better `value` is than `without`; below 1: worse. 0 if nothing was measured."""
    if not (without > 0.0 and value > 0.0):
        return 0.0
    return without / value if less_is_better else value / without


def told(factor: float, better: str, worse: str, same: str) -> str:
    """Return the sentence that the factor supports; `{}` in the first two is the factor, above 1."""
    if not factor:
        return "Nothing could be measured here."
    if factor >= NOISE:
        return better.format(f"{factor:.1f}")
    return worse.format(f"{1 / factor:.1f}") if factor <= 1 / NOISE else same


def told_of_pauses(num_running: int, before: float, after: float, cost: str) -> str:
    """Describe how the longest pause of running streams changed when a long prompt came. cost: to that prompt."""
    return told(
        gain(before, after, less_is_better=True),
        f"{num_running} running streams paused {{}} times shorter during a long prompt; {cost}.",
        f"{num_running} running streams paused longer during a long prompt, by a factor of {{}}; {cost}.",
        f"{num_running} running streams paused about as long during a long prompt; {cost}.",
    )


def shown(comparison: Comparison) -> RenderableType:
    """Draw bars on one scale, the longest for the largest value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=24)
    table.add_column(justify="right", min_width=6)
    table.add_column()
    largest = max((arm.value for arm in comparison.arms), default=0.0)
    for number, arm in enumerate(comparison.arms):
        width = round(BAR_WIDTH * arm.value / largest) if largest > 0 else 0
        style = "cyan" if number else "bright_black"
        table.add_row(Text(arm.label), _number(arm.value), Text("█" * width, style=style))
    unit = f", {comparison.unit}; {'shorter' if comparison.less_is_better else 'longer'} is better"
    head = Text.assemble((f"\n{comparison.title}", "bold"), (unit, "bright_black"))
    return Group(head, table, Text(comparison.sentence))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
