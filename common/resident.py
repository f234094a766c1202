"""Resident memory of a process, as GET /v1/cluster shows it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory. private: heaps and stacks. shared: pages in use of the KV pool and the host tier."""

    private_bytes: int = 0
    shared_bytes: int = 0


def resident(pid: int | str = "self") -> Resident:
    """Read the resident memory of a process; zeros when it is gone, or without Linux's /proc."""
    with contextlib.suppress(OSError, KeyError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Resident(*(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")))
    return Resident()
