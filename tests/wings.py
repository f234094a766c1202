"""Core and wings as listed in wings.toml: their imports and sizes, and a copy of the core without wings.

python -m tests.wings                   # print the table of docs/architecture.md, "Size"
python -m tests.wings --core-alone DIR  # copy the tree without the removable wings into DIR;
                                        # print the tests there, which need none of these wings
python -m tests.wings --core-tests      # only print these tests
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE: dict[str, Any] = tomllib.loads((ROOT / "wings.toml").read_text(encoding="utf-8"))
WINGS: dict[str, dict[str, Any]] = TABLE["wings"]
# Names that `engine` and `mini_infer` import lazily.
OFFLINE_NAMES = {"LLM", "AsyncLLM", "Completion", "Embedding"}
REGISTERED = re.compile(r"[a-z0-9_.]+:\w+")  # "module:Name"
# Tests that can run in the copy: they need only Python, no page, image, manifest or real model.
ALONE = ("cli/cluster", "common", "engine", "kvstore", "router", "worker", "cluster/test_end_to_end.py")


@cache
def files() -> dict[str, str]:
    """Return the wing of every file of the product; empty: the core."""
    wing_of = {}
    for folder in TABLE["core"]["folders"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            owners = [wing for wing, entry in WINGS.items() if any(fnmatch(name, glob) for glob in entry["files"])]
            assert len(owners) <= 1, f"{name} belongs to {owners}"
            wing_of[name] = owners[0] if owners else ""
    return wing_of


def _statements(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield imports and constants, which may name modules, and whether they run when the module is imported."""
    eager: set[ast.AST] = set()
    blocks: list[ast.stmt] = list(tree.body)
    while blocks:
        node = blocks.pop()
        eager.add(node)
        if isinstance(node, ast.Try | ast.With):
            blocks += node.body
    for each in ast.walk(tree):
        if isinstance(each, ast.Import | ast.ImportFrom | ast.Constant):
            yield each, each in eager


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        asks = node.module in ("engine", "mini_infer") and any(alias.name in OFFLINE_NAMES for alias in node.names)
        offline = ["engine.offline.llm"] if asks else []
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names), *offline]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and REGISTERED.fullmatch(node.value):
        return [node.value.partition(":")[0]]
    return []


@cache
def imported(name: str) -> dict[str, bool]:
    """Return the repository's files that a file imports, also for types only, and whether it does so eagerly."""
    imports: dict[str, bool] = {}
    for node, is_eager in _statements(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        for module in _modules(node):
            path = module.replace(".", "/")
            for each in (f"{path}.py", f"{path}/__init__.py"):
                if (ROOT / each).is_file():
                    imports[each] = imports.get(each, False) or is_eager
    return imports


@cache
def importers(eager: bool = False) -> dict[str, dict[str, set[str]]]:
    """Map wing -> importing wing (empty: the core) -> files. eager: only files that fail without the wing."""
    result: dict[str, dict[str, set[str]]] = {wing: {} for wing in WINGS}
    for name, owner in files().items():
        for other, is_eager in imported(name).items():
            wing = files().get(other, "")
            if wing not in ("", owner) and (is_eager or not eager):
                result[wing].setdefault(owner, set()).add(name)
    return result


def circles() -> list[list[str]]:
    """Return all sets of product files that import each other, directly or not, also for types only."""
    reached: dict[str, set[str]] = {}
    for name in files():
        pending = [name]
        seen = reached[name] = set()
        while pending:
            new = {other for other in imported(pending.pop()) if other in files()} - seen
            seen |= new
            pending += new
    mutual = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
    return sorted(sorted(each) for each in mutual if len(each) > 1)


def removable() -> list[str]:
    """Return the wings that wings.toml calls removable."""
    return [wing for wing, entry in WINGS.items() if entry.get("removable")]


def needs(name: str, gone: Iterable[str]) -> bool:
    """Whether a test file cannot run without the files that are gone.

    It imports one of them, directly or not, or all files in the folder that it tests are gone.
    """
    missing = set(gone)
    folder = Path(name).parent.relative_to("tests").as_posix()
    tested = [each for each in files() if each.rpartition("/")[0] == folder]
    if tested and missing.issuperset(tested):
        return True
    pending, seen = [name], {name}
    while pending:
        for other, is_eager in imported(pending.pop()).items():
            if not is_eager:
                continue
            if other in missing:
                return True
            if other not in seen and other not in files():
                seen.add(other)
                pending.append(other)
    return False


@cache
def core_tests() -> list[str]:
    """Return the test files that run without the removable wings."""
    gone = [name for name, wing in files().items() if wing in removable()]
    chosen = [ROOT / "tests" / each for each in ALONE]
    paths = [path for each in chosen for path in ([each] if each.is_file() else each.rglob("test_*.py"))]
    tests = [path.relative_to(ROOT).as_posix() for path in paths]
    return sorted(name for name in tests if not needs(name, gone))


def copy_core(to: Path) -> None:
    """Copy git's files and the gRPC stubs, without the removable wings and the tests that need them."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    kept = set(core_tests())
    for name in [*listed, *(f"protos/{path.name}" for path in ROOT.glob("protos/*_pb2*"))]:
        is_other_test = name.startswith("tests/") and Path(name).name.startswith("test_") and name not in kept
        if files().get(name, "") in removable() or is_other_test or not (ROOT / name).is_file():
            continue
        for source in [ROOT / name, *(ROOT / name).parent.glob(f"__pycache__/{Path(name).stem}.*.pyc")]:
            target = to / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)  # with its time, so that compiled files stay valid
    # An editable installation of the project would find the missing modules in the original tree.
    (to / "sitecustomize.py").write_text(
        "import sys\n\nsys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]\n"
    )


def lines(names: Iterable[str]) -> int:
    return sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in names)


def size_table() -> str:
    """Return a Markdown table of core and wings: lines, files, and the number of core files that name the wing."""
    named = importers()
    rows = ["| part | lines | files | files of the core that name it |", "|---|---|---|---|"]
    core = [name for name, owner in files().items() if not owner]
    rows.append(f"| core | {lines(core):,} | {len(core)} | |")
    for wing in WINGS:
        names = [name for name, owner in files().items() if owner == wing]
        rows.append(f"| {wing} | {lines(names):,} | {len(names)} | {len(named[wing].get('', ()))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wings", description="Core and wings of wings.toml.")
    parser.add_argument("--core-alone", metavar="DIR", type=Path, help="copy the tree without removable wings")
    parser.add_argument("--core-tests", action="store_true", help="print the files of tests that run in such a copy")
    options = parser.parse_args()
    if options.core_alone is not None:
        copy_core(options.core_alone)
    if options.core_alone is not None or options.core_tests:
        print(*core_tests(), sep="\n")
    else:
        print(size_table())


if __name__ == "__main__":
    main()
