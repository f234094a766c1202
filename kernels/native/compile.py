"""Compiles C code of folders; `python kernels/native/compile.py FOLDER...` puts the libraries there, for images."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off", "-Wno-psabi")
COMPILE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """Libraries for CPUs with `instructions`, by torch's names; empty: for any CPU."""

    instructions: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        names = (f"-m{name.replace('_', '').replace('fma3', 'fma')}" for name in self.instructions)
        return (*FLAGS, *names)

    def file_name(self, folder: Path) -> str:
        """Return the library's name for the folder's sources."""
        digest = hashlib.sha256(repr(self.flags).encode())
        for source in sorted((*folder.glob("*.c"), *folder.glob("*.h"))):
            digest.update(source.read_bytes())
        return f"{folder.name}-{digest.hexdigest()[:16]}.so"


AVX512 = Variant(("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni", "avx512_bf16", "fma3", "f16c"))
AVX2 = Variant(("avx2", "fma3", "f16c"))
VARIANTS = AVX512, AVX2  # fastest first
ANY_CPU = Variant()


def library_path(folder: Path, variant: Variant) -> Path:
    """Return the variant's library of a folder's C files: stored there, or compiled into the user's cache.

    Raises OSError without gcc or a writable cache, subprocess.SubprocessError if gcc fails.
    """
    name = variant.file_name(folder)
    if (folder / name).is_file():
        return folder / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini-infer" / "kernels"
    if not (cache / name).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        compile_into(cache, folder, variant)
    return cache / name


def compile_into(target: Path, folder: Path, variant: Variant) -> None:
    """Compile the library; it appears whole, and other processes may do the same. Raises as `library_path`."""
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("gcc is not installed")
    sources = map(str, sorted(folder.glob("*.c")))
    with tempfile.TemporaryDirectory(dir=target) as partial:
        made = Path(partial) / "library.so"
        command = [compiler, *variant.flags, *sources, "-o", str(made), "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        made.replace(target / variant.file_name(folder))


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]):
        for variant in VARIANTS if platform.machine() == "x86_64" else (ANY_CPU,):
            compile_into(each, each.resolve(), variant)
