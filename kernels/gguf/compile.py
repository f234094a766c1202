"""Compile the C code of this folder: `python kernels/gguf/compile.py` puts all variants here, as images have them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("linear.c", "avx2.h", "blocks.h", "few_rows.h", "many_rows.h", "output.h")
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off")
COMPILE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """The library for CPUs that have `instructions`, by torch's names."""

    instructions: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        names = (f"-m{name.replace('_', '').replace('fma3', 'fma')}" for name in self.instructions)
        return (*FLAGS, *names)

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(repr(self.flags).encode())
        for source in SOURCES:
            digest.update((HERE / source).read_bytes())
        return f"gguf-{digest.hexdigest()[:16]}.so"


AVX512 = Variant(("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni", "avx512_bf16", "fma3", "f16c"))
AVX2 = Variant(("avx2", "fma3", "f16c"))
VARIANTS = AVX512, AVX2  # the fastest first


def library_path(variant: Variant) -> Path:
    """The variant's library of these sources: here, or compiled into the user's cache.

    Raises OSError without gcc or a place to write to, subprocess.SubprocessError where gcc fails.
    """
    name = variant.file_name
    if (HERE / name).is_file():
        return HERE / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mini-infer" / "kernels"
    if not (cache / name).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        compile_into(cache, variant)
    return cache / name


def compile_into(folder: Path, variant: Variant) -> None:
    """Raises as `library_path`. The library appears whole, and other processes may do the same."""
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("gcc is not installed")
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        made = Path(partial) / "library.so"
        command = [compiler, *variant.flags, str(HERE / "linear.c"), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        made.replace(folder / variant.file_name)


if __name__ == "__main__":
    for each in VARIANTS:
        compile_into(HERE, each)
