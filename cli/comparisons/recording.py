"""A picture of a terminal in which parts appear one after another: rich's SVG with CSS animation.

Where animations are not played, or not wanted, all parts are visible from the start.
"""

from __future__ import annotations

import io
import re

from rich.console import Console, RenderableType

WIDTH = 84  # columns
PART_SECONDS = 1.5  # between two parts
LINE = re.compile(r'(<text )([^>]*clip-path="url\(#[\w-]+-line-(\d+)\)")')
STYLE = """<style>
    @keyframes appear { from { opacity: 0 } to { opacity: 1 } }
    text[style] { animation: appear 1ms backwards }
    @media (prefers-reduced-motion: reduce) { text[style] { animation: none } }
"""


class Recording:
    """Records what is shown part by part, for a picture."""

    def __init__(self) -> None:
        self._console = Console(
            width=WIDTH, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor",
            highlight=False,
        )  # fmt: skip
        self._ends: list[int] = []  # of parts, in lines

    def add(self, part: RenderableType) -> None:
        self._console.print(part)
        self._ends.append(self._console.export_text(clear=False).count("\n"))

    def svg(self, title: str) -> str:
        """Return the picture."""

        def delayed(text: re.Match[str]) -> str:
            number = sum(end <= int(text[3]) for end in self._ends)
            return f'{text[1]}style="animation-delay: {number * PART_SECONDS}s" {text[2]}'

        drawn = self._console.export_svg(title=title, clear=False)
        return LINE.sub(delayed, drawn).replace("<style>", STYLE, 1)
