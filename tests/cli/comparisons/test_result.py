"""A result's sentence claims no more than the numbers show."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cli.comparisons.result import BAR_WIDTH, Arm, Comparison, gain, shown, told

SENTENCES = ("{} times better", "{} times worse", "the same")


@pytest.mark.parametrize(
    ("without", "value", "less", "sentence"),
    [
        (10.0, 25.0, False, "2.5 times better"),
        (25.0, 10.0, False, "2.5 times worse"),
        (10.0, 10.9, False, "the same"),
        (10.9, 10.0, False, "the same"),
        (10.0, 25.0, True, "2.5 times worse"),
        (25.0, 10.0, True, "2.5 times better"),
        (0.0, 10.0, False, "Nothing could be measured here."),
        (10.0, 0.0, True, "Nothing could be measured here."),
    ],
)
def test_the_sentence_is_chosen_by_the_numbers(without: float, value: float, less: bool, sentence: str) -> None:
    assert told(gain(without, value, less), *SENTENCES) == sentence


def text_of(comparison: Comparison) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(shown(comparison))
    return console.export_text().splitlines()


def test_bars_have_one_scale() -> None:
    lines = text_of(Comparison("Title", "tokens/s", [Arm("without", 25.0), Arm("with", 100.0)], "A sentence."))
    assert lines[1] == "Title, tokens/s; longer is better"
    assert [line.count("█") for line in lines[2:4]] == [BAR_WIDTH // 4, BAR_WIDTH]
    assert "25.0" in lines[2]
    assert "100" in lines[3]
    assert lines[4] == "A sentence."


def test_nothing_measured_has_no_bar() -> None:
    lines = text_of(Comparison("Title", "ms", [Arm("without", 0.0), Arm("with", 0.0)], "None.", less_is_better=True))
    assert "shorter is better" in lines[1]
    assert not any("█" in line for line in lines)
