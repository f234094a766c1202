"""The picture of a demo: parts appear one after the other, and all are visible without animation."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text

from cli.comparisons import command
from cli.comparisons.recording import PART_SECONDS, Recording
from cli.comparisons.result import Arm, Comparison
from cli.main import main


def delays(svg: str) -> dict[str, float]:
    """Map each text to the seconds after which it appears."""
    found = {}
    for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if delay := re.fullmatch(r"animation-delay: ([\d.]+)s", text.get("style", "")):
            found["".join(text.itertext()).replace("\xa0", " ").strip()] = float(delay[1])
    return {text: delay for text, delay in found.items() if text}


def test_parts_appear_one_after_the_other() -> None:
    recording = Recording()
    for part in ("first\nand more", "second", "third <&>"):
        recording.add(Text(part))
    svg = recording.svg("a title")
    seconds = [number * PART_SECONDS for number in (0, 0, 1, 2)]
    assert delays(svg) == dict(zip(("first", "and more", "second", "third <&>"), seconds, strict=True))
    assert "a title" in svg.replace("&#160;", " ")
    assert "opacity: 0" not in re.sub(r"@keyframes.*", "", svg)  # nothing is hidden but by the animation


def test_the_command_draws_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison("Title", "tokens/s", [Arm("without", 10.0), Arm("with", 20.0)], "Twice as fast.")
    monkeypatch.setattr(command, "_measured", lambda _name, _model, _num_threads: comparison)
    assert main(["demo", "--compare=batching", f"--svg={tmp_path / 'demo.svg'}"]) == 0
    shown = (tmp_path / "demo.svg").read_text().replace("&#160;", " ")
    for text in ("mini-infer demo --compare batching", "Twice as fast.", "without", "██"):
        assert text in shown
