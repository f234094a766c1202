"""docs/compatibility.md: which features work together, each cell by a test that runs both or by a refusal.

python -m tests.compatibility > docs/compatibility.md

Rules between settings are those that the settings of the core and of wings have; the tests, and what is refused where
a model or a request is read, stand in compatibility.toml beside this file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from engine.config import EngineConfig

Kind = Literal["refusal", "need", "never", "limit"]
Pair = frozenset[str]  # of keys: two features, or a feature and a device

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TESTS: dict[str, list[list[str]]] = TABLE["tests"]
DEVICES = {"cpu": "on a CPU", "gpu": "on a GPU"}
FLAGS: dict[str, list[str]] = TABLE["settings"]  # of each feature, its name and what turns it on
KEYS = {flag[2:].partition(" ")[0].replace("-", "_"): key for key, (_, flag) in FLAGS.items()}
"""By field of the engine's settings."""
SETTINGS = [key for key in FLAGS if key not in DEVICES]
OTHERS: dict[str, str] = TABLE["others"]
NAMES = {key: f"{FLAGS[key][0]} (`{FLAGS[key][1]}`)" for key in SETTINGS} | OTHERS
INTRODUCTION = """# Compatibility

Which features work together. `python -m tests.compatibility` writes this page: `setting` of each says what it
excludes and needs, `tests/compatibility.toml` names the tests and the other refusals.

| mark | meaning |
|---|---|
| ✓ | a test runs the two together on a CPU, and one on a GPU (without a GPU it runs interpreted, or is skipped) |
| c, g | a test runs the two together on a CPU alone, on a GPU alone |
| n | the row needs the column (or another of those that its reason names) |
| ✗ | refused, or done without the other, with a message |
| – | cannot be asked for together |
| empty | nothing refuses the two, and no test runs them together |

The number after a mark is that of the reason, or of a limit, at the end of the page. [Fields of
requests](request_fields.md) says what becomes of each field.
"""


@dataclass(frozen=True, slots=True)
class Note:
    """A reason. cells: (row, column) that it is about. text: Markdown. file, says, test: see compatibility.toml."""

    kind: Kind
    cells: tuple[tuple[str, str], ...]
    text: str
    file: str = ""
    says: str = ""
    test: str = ""


def rules(kind: str) -> list[tuple[str, list[str], str]]:
    """A setting, those that it excludes or of which it needs one, and the reason. kind: `excludes` or `needs`."""
    return [
        (KEYS[field.name], [KEYS[name] for name in names], reason)
        for field in fields(EngineConfig)
        for names, reason in field.metadata[kind].items()
    ]


@cache
def notes() -> tuple[Note, ...]:
    """All reasons, in the order of their numbers from 1."""
    refused: dict[str, list[tuple[str, str]]] = {}
    for one, others, reason in rules("excludes"):
        refused.setdefault(reason, []).extend((one, other) for other in others)
    found = [Note("refusal", tuple(cells), f"“{reason}”") for reason, cells in refused.items()]
    for one, others, reason in rules("needs"):
        found.append(Note("need", tuple((one, other) for other in others), f"“{reason}”"))
    for entry in TABLE["note"]:
        found.append(Note(**{**entry, "cells": tuple(map(tuple, entry["cells"]))}))
    return tuple(found)


@cache
def run_together() -> dict[Pair, frozenset[str]]:
    """Devices on which tests run a pair. A feature with a device counts as a pair, too."""
    found: dict[Pair, frozenset[str]] = {}
    for test, runs in TESTS.items():
        device = "gpu" if test.startswith("tests/gpu/") else "cpu"
        for features in runs:
            for pair in (*combinations(features, 2), *((key, device) for key in features)):
                found[frozenset(pair)] = found.get(frozenset(pair), frozenset()) | {device}
    return found


def needs(key: str) -> list[tuple[str, ...]]:
    """What a feature needs: of each entry any one."""
    found: list[tuple[str, ...]] = []
    for note in notes():
        wanted = tuple(other for one, other in note.cells if note.kind == "need" and one == key)
        found += [wanted] if wanted else []
    return found


def refusal(one: str, other: str) -> int:
    """The number of the reason why the two, or what they need, exclude each other; 0: they do not."""
    for number, note in enumerate(notes(), 1):
        if note.kind in ("refusal", "never") and {one, other} in map(set, note.cells):
            return number
    for feature, against in ((one, other), (other, one)):
        for options in needs(feature):
            numbers = [0 if each == against else refusal(each, against) for each in options]
            if all(numbers):
                return numbers[0]
    return 0


def cell(row: str, column: str) -> str:
    """A mark, and the number of a reason."""
    if number := refusal(row, column):
        return f"{'–' if notes()[number - 1].kind == 'never' else '✗'} {number}"
    devices = run_together().get(frozenset((row, column)), frozenset())
    mark = "" if not devices else "✓" if len(devices) == 2 or column in DEVICES else min(devices)[0]
    for number, note in enumerate(notes(), 1):
        if note.kind == "need" and (row, column) in note.cells:
            mark += f" n {number}"
        if note.kind == "limit" and {row, column} in map(set, note.cells):
            mark += f" {number}"
    return mark.strip()


def pairs() -> Iterable[tuple[str, str]]:
    """Every two features."""
    return combinations(NAMES, 2)


def untested() -> list[tuple[str, str]]:
    """Pairs that nothing refuses and no test runs."""
    return [pair for pair in pairs() if not (refusal(*pair) or frozenset(pair) in run_together())]


def table(header: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def page() -> str:
    numbers = {key: str(number) for number, key in enumerate(NAMES, 1)}
    lines = [INTRODUCTION, "## Features with features", "", "Columns are rows by number.", ""]
    rows = [
        [numbers[row], name, *("" if row == column else cell(row, column) for column in NAMES)]
        for row, name in NAMES.items()
    ]
    lines += table(["", "feature", *numbers.values()], rows)
    lines += ["", "## Features with devices", "", "✓: a test runs the feature there.", ""]
    lines += table(
        ["feature", *DEVICES.values()], ([name, cell(key, "cpu"), cell(key, "gpu")] for key, name in NAMES.items())
    )
    lines += ["", "## Reasons and limits", ""]
    for number, note in enumerate(notes(), 1):
        lines.append(f"{number}. {note.text}" + (f" (`{note.file}`)" if note.file and note.kind != "never" else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
