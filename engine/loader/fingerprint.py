"""A name for "these weights, held this way": equal on two hosts with the same files, different otherwise.

Weights are not read whole: headers (names, shapes, types, offsets), file sizes and evenly spread samples stand for
them. It guards against mixing models by mistake, not against someone who forges a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NUM_SAMPLES = 256
SAMPLE_BYTES = 4096


def fingerprint(parts: dict[str, Any], files: Iterable[Path]) -> str:
    """SHA-256 over `parts` (JSON values and dataclasses) and a digest of each file; names of folders do not count."""
    digest = hashlib.sha256()
    digest.update(json.dumps(parts, sort_keys=True, default=dataclasses.asdict).encode())
    for path in files:
        digest.update(f"|{path.name}|".encode())
        digest.update(sampled_digest(path))
    return digest.hexdigest()


def sampled_digest(path: Path) -> bytes:
    """SHA-256 of the file's size, its first MiB (where headers lie) and samples spread over the rest."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        if size > 1 << 20:
            for index in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
