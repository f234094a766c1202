"""The walls between core and wings, by the imports: wings.toml says who may import whom.

Lists of importers must be exact, so that a file that stops importing a wing leaves the list for good.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MAX_NAMED_BY = 3
# Wings that more files of the core import, and how many: a number may fall, none may rise or join.
TOO_MANY = {
    "experts": 6,
    "expert_balancing": 5,
    "latent_attention": 6,
    "tensor_parallel": 11,
    "pipeline_parallel": 6,
    "quantization": 6,
    "gguf": 4,
    "host_tier": 6,
    "latency_objectives": 6,
}
MAX_FILES = 15  # of a folder, so that a listing is read at a glance
TABLE: dict[str, Any] = tomllib.loads((ROOT / "wings.toml").read_text(encoding="utf-8"))
WINGS: dict[str, dict[str, list[str]]] = TABLE["wings"]


@cache
def files() -> dict[str, str]:
    """Every file of the product, and the wing it belongs to; empty: the core."""
    found = {}
    for folder in TABLE["core"]["folders"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            owners = [wing for wing, entry in WINGS.items() if any(fnmatch(name, glob) for glob in entry["files"])]
            assert len(owners) <= 1, f"{name} belongs to {owners}"
            found[name] = owners[0] if owners else ""
    return found


def imported(name: str) -> Iterator[str]:
    """Files that a file imports anywhere, also for types alone."""
    for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            path = module.replace(".", "/")
            yield from (each for each in (f"{path}.py", f"{path}/__init__.py") if each in files())


@cache
def importers() -> dict[str, dict[str, set[str]]]:
    """Wing -> wing or, for the core, empty -> files there that import it."""
    found: dict[str, dict[str, set[str]]] = {wing: {} for wing in WINGS}
    for name, owner in files().items():
        for other in imported(name):
            if files()[other] not in ("", owner):
                found[files()[other]].setdefault(owner, set()).add(name)
    return found


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
    assert {wing: count for wing, count in counts.items() if count > MAX_NAMED_BY} == TOO_MANY


def test_no_folder_is_crowded() -> None:
    everywhere = [*TABLE["core"]["folders"], "benchmarks", "examples", "monitoring", "tests"]
    counts = Counter(path.parent for folder in everywhere for path in (ROOT / folder).rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}
