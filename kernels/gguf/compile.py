"""Compile the C code of this folder: `python kernels/gguf/compile.py` puts the library here, as images have it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("linear.c", "blocks.h", "few_rows.h", "many_rows.h", "output.h")
FLAGS = (
    *("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16", "-mfma", "-mf16c"),
)
COMPILE_SECONDS = 120.0


def library_path() -> Path:
    """The library of these sources: here, or compiled into the user's cache.

    Raises OSError without gcc or a place to write to, subprocess.SubprocessError where gcc fails.
    """
    name = _name()
    if (HERE / name).is_file():
        return HERE / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini-infer" / "kernels"
    if not (cache / name).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        compile_into(cache)
    return cache / name


def compile_into(folder: Path) -> None:
    """Raises as `library_path`. The library appears whole, and other processes may do the same."""
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("gcc is not installed")
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        made = Path(partial) / "library.so"
        command = [compiler, *FLAGS, str(HERE / "linear.c"), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        made.replace(folder / _name())


def _name() -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in SOURCES:
        digest.update((HERE / source).read_bytes())
    return f"gguf-{digest.hexdigest()[:16]}.so"


if __name__ == "__main__":
    compile_into(HERE)
