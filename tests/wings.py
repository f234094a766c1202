"""Core and wings as wings.toml lists them: who imports whom, how large they are, the core in a copy without wings.

python -m tests.wings                 # the table of docs/architecture.md, "Size"
python -m tests.wings --core-alone DIR  # copy the tree into DIR without the wings that can be removed;
                                        # prints the tests there that need none of them
python -m tests.wings --core-tests      # only print them
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
# Which `engine` and `mini_infer` load when they are asked for.
OFFLINE_NAMES = {"LLM", "AsyncLLM", "Completion", "Embedding"}
REGISTERED = re.compile(r"[a-z0-9_.]+:\w+")  # "module:Name"
# Whose tests run in the copy: what they test is in Python alone, no page, image, manifest or real model.
ALONE = ("cli/cluster", "common", "engine", "kvstore", "router", "worker", "cluster/test_end_to_end.py")


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


def _statements(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Imports, and texts by which a registry names modules; whether they run when the module is imported."""
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
    """Files of this repository that a file imports anywhere, also for types alone, and whether it does so eagerly."""
    found: dict[str, bool] = {}
    for node, is_eager in _statements(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
        for module in _modules(node):
            path = module.replace(".", "/")
            for each in (f"{path}.py", f"{path}/__init__.py"):
                if (ROOT / each).is_file():
                    found[each] = found.get(each, False) or is_eager
    return found


@cache
def importers(eager: bool = False) -> dict[str, dict[str, set[str]]]:
    """Wing -> wing or, for the core, empty -> files there that import it. eager: those that cannot do without."""
    found: dict[str, dict[str, set[str]]] = {wing: {} for wing in WINGS}
    for name, owner in files().items():
        for other, is_eager in imported(name).items():
            wing = files().get(other, "")
            if wing not in ("", owner) and (is_eager or not eager):
                found[wing].setdefault(owner, set()).add(name)
    return found


def circles() -> list[list[str]]:
    """Files of the product that import each other, directly or not, also for types alone: each set of them."""
    reached: dict[str, set[str]] = {}
    for name in files():
        left = [name]
        seen = reached[name] = set()
        while left:
            found = {other for other in imported(left.pop()) if other in files()} - seen
            seen |= found
            left += found
    mutual = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
    return sorted(sorted(each) for each in mutual if len(each) > 1)


def removable() -> list[str]:
    """The wings that wings.toml calls removable."""
    return [wing for wing, entry in WINGS.items() if entry.get("removable")]


def needs(name: str, gone: Iterable[str]) -> bool:
    """Whether a file of tests cannot do without a file that is gone.

    It, or one that it imports, imports such a file, or it lies in the folder under tests/ of nothing but such files.
    """
    missing = set(gone)
    folder = Path(name).parent.relative_to("tests").as_posix()
    here = [each for each in files() if Path(each).parent.as_posix() == folder]
    if here and missing.issuperset(here):
        return True
    left, seen = [name], {name}
    while left:
        for other, is_eager in imported(left.pop()).items():
            if not is_eager:
                continue
            if other in missing:
                return True
            if other not in seen and other not in files():
                seen.add(other)
                left.append(other)
    return False


def core_tests() -> list[str]:
    """Files of tests that run without the removable wings."""
    gone = [name for name, wing in files().items() if wing in removable()]
    chosen = [ROOT / "tests" / each for each in ALONE]
    found = [path for each in chosen for path in ([each] if each.is_file() else each.rglob("test_*.py"))]
    tests = [path.relative_to(ROOT).as_posix() for path in found]
    return sorted(name for name in tests if not needs(name, gone))


def copy_core(to: Path) -> None:
    """Copy what git knows, and the gRPC stubs, without the removable wings and the tests that need them."""
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
            shutil.copy2(source, target)  # with its time: what is compiled stays valid
    # An editable installation of the project finds modules that a package here lacks, in the tree that was copied.
    (to / "sitecustomize.py").write_text(
        "import sys\n\nsys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]\n"
    )


def lines(names: Iterable[str]) -> int:
    return sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in names)


def size_table() -> str:
    """Lines and files of the core and of each wing, and how many files of the core name the wing, as Markdown."""
    named = importers()
    rows = ["| part | lines | files | files of the core that name it |", "|---|---|---|---|"]
    core = [name for name, owner in files().items() if not owner]
    rows.append(f"| core | {lines(core):,} | {len(core)} | |")
    for wing in WINGS:
        own = [name for name, owner in files().items() if owner == wing]
        rows.append(f"| {wing} | {lines(own):,} | {len(own)} | {len(named[wing].get('', ()))} |")
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
