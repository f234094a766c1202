"""Resident memory of a process, private and shared apart."""

from __future__ import annotations

import mmap
import subprocess
import sys

from common.process import trim_heap
from common.resident import Resident, resident

SIZE = 64 << 20
SLACK = 16 << 20  # what else this process does meanwhile


def touch(memory: mmap.mmap) -> None:
    for offset in range(0, SIZE, mmap.PAGESIZE):
        memory[offset] = 1


def test_used_pages_count_where_they_belong() -> None:
    before = resident()
    shared = mmap.mmap(-1, SIZE)
    assert resident().shared_bytes < before.shared_bytes + SLACK  # not used yet
    touch(shared)
    middle = resident()
    assert SIZE <= middle.shared_bytes - before.shared_bytes < SIZE + SLACK
    assert middle.private_bytes - before.private_bytes < SLACK
    private = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch(private)
    after = resident()
    assert SIZE - SLACK < after.private_bytes - middle.private_bytes < SIZE + SLACK
    shared.close()
    private.close()
    assert resident().shared_bytes < before.shared_bytes + SLACK


def test_a_process_that_is_gone_has_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident(child.pid) == Resident()


def test_what_the_heap_keeps_goes_back() -> None:
    pieces = [bytes(4000) for _ in range(20_000)]  # too small for mappings of their own
    fence = bytes(4000)  # after them: the heap's end cannot move below it
    del pieces
    before = resident().private_bytes
    trim_heap()
    assert resident().private_bytes < before - (SIZE >> 1)
    assert len(fence) == 4000
