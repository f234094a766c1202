"""The walls between core and wings, by the imports: wings.toml says who may import whom.

Lists of importers must be exact, so that a file that stops importing a wing leaves the list for good.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatch

import pytest

from tests.wings import ROOT, TABLE, WINGS, circles, files, importers, removable, size_table

MAX_NAMED_BY = 3
MAX_FILES = 15  # of a folder, so that a listing is read at a glance


def test_every_pattern_names_a_file() -> None:
    for wing, entry in WINGS.items():
        for glob in entry["files"]:
            assert any(fnmatch(name, glob) for name in files()), f"{wing}: {glob}"


@pytest.mark.parametrize("wing", WINGS)
def test_the_core_imports_a_wing_only_from_the_files_listed(wing: str) -> None:
    assert sorted(importers()[wing].get("", ())) == sorted(WINGS[wing].get("named_by", []))


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_uses_only_the_wings_listed(wing: str) -> None:
    used = [other for other in WINGS if wing in importers()[other]]
    assert sorted(used) == sorted(WINGS[wing].get("uses", []))


def test_few_files_of_the_core_name_a_wing() -> None:
    counts = {wing: len(entry.get("named_by", [])) for wing, entry in WINGS.items()}
    assert {wing: count for wing, count in counts.items() if count > MAX_NAMED_BY} == {}


def test_the_page_has_the_sizes() -> None:
    """`python -m tests.wings` prints its table; lines may have moved a little since."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for row in size_table().splitlines()[2:]:
        name, now = re.findall(r"[^|]+", row)[0].strip(), _lines_of(row)
        [told] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert abs(_lines_of(told) - now) <= 50 + now // 20, (told, row)


def _lines_of(row: str) -> int:
    return int(row.split("|")[2].replace(",", ""))


def test_no_files_import_each_other() -> None:
    """Imports for types count: who reads one of two such files has to read the other."""
    assert circles() == []


def test_no_folder_is_crowded() -> None:
    everywhere = [*TABLE["core"]["folders"], "benchmarks", "examples", "monitoring", "tests"]
    counts = Counter(path.parent for folder in everywhere for path in (ROOT / folder).rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("wing", removable())
def test_nothing_that_stays_needs_a_removable_wing(wing: str) -> None:
    """Imports elsewhere are for types, inside functions, or after `has_wing`."""
    needed_by = {by: names for by, names in importers(eager=True)[wing].items() if by not in removable()}
    assert needed_by == {}
