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

from common.file_digest import sampled_digest


def fingerprint(parts: dict[str, Any], files: Iterable[Path]) -> str:
    """SHA-256 over `parts` (JSON values and dataclasses) and a digest of each file; names of folders do not count."""
    digest = hashlib.sha256()
    digest.update(json.dumps(parts, sort_keys=True, default=dataclasses.asdict).encode())
    for path in files:
        digest.update(f"|{path.name}|".encode())
        digest.update(sampled_digest(path))
    return digest.hexdigest()
