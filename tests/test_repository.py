"""What must hold for the repository as a whole: import paths, and layering at run time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    "mini_infer", "common", "kernels", "kvstore", "engine", "worker", "prefill_service", "decode_service", "router",
    "cli",
]  # fmt: skip
SHIPPED = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_kernels_is_ours() -> None:
    """Hugging Face ships a package of the same name, which transformers looks for."""
    import kernels

    home = Path(kernels.__file__).resolve().parent
    assert home == ROOT / "kernels", (
        f"`kernels` resolves to {home}: install the project editable (make test does) and start it with the "
        "repository first on the path (python -m router, PYTHONPATH=/app)"
    )


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("router.server", ["torch", "engine", "transformers", "numpy"]),
        ("worker.front.front", ["torch", "transformers"]),
        ("worker.front.servicer", ["torch", "transformers"]),
        ("kvstore.tier.agent", ["torch", "transformers"]),
        ("cli.main", ["torch", "starlette", "transformers"]),
        ("kvstore.pool.block_pool", ["torch", "numpy", "grpc"]),
        ("engine.scheduling.scheduler", ["torch", "numpy", "grpc"]),
    ],
)
def test_imports_stay_light(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_guards_are_not_asserts() -> None:
    """Under `python -O` what a user can cause is still refused."""
    code = (
        "from engine.request import SamplingParams\n"
        "from common.errors import InvalidRequestError\n"
        "try:\n    SamplingParams(max_tokens=0)\n"
        "except InvalidRequestError:\n    print('refused')"
    )
    result = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.stdout.strip() == "refused", result.stderr


def imported_first(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that happen while a module is imported: not those of functions, nor those for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "TYPE_CHECKING" not in ast.unparse(
            node
        ):
            yield from imported_first([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def test_every_module_can_be_the_first_one_imported() -> None:
    """No circle that happens to work because others come first."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in SHIPPED
    }
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in imported_first(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= named & modules.keys() or {str(node.module)}
        # A package runs before what is in it, and is there already for what is in it.
        packages = {each.rpartition(".")[0] for each in found}
        found |= {package for package in packages if not f"{name}.".startswith(f"{package}.")}
        imports[name] = found & modules.keys() - {name}
    assert sum(map(len, imports.values())) > 1000
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle
