"""Make the gRPC stubs: from protos/*.proto to protos/*_pb2*.py.

setuptools runs this for wheels and editable installs (pyproject.toml names `BuildPy`); `make protos` and the
Dockerfile run `python build_stubs.py`, which writes beside the .proto files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def make_stubs(target: Path) -> None:
    """Write the modules of the package `protos` under `target`. Ends the program where protoc refuses a file."""
    from grpc_tools import protoc  # while a source distribution is made, it need not be there

    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("protos/*.proto"))
    status = protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources])
    if status:
        sys.exit(f"protoc ended with status {status}")


class BuildPy(build_py):  # type: ignore[misc]
    """Put the stubs where the other modules go: into what a wheel is packed from, or for an editable install here."""

    def run(self) -> None:
        super().run()
        make_stubs(ROOT if self.editable_mode else Path(self.build_lib).resolve())


if __name__ == "__main__":
    make_stubs(ROOT)
