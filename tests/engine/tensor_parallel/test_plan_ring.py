"""The ring between processes: frames of all sizes in order, a full ring waits, a lost reader ends the wait."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import time

import pytest

from engine.tensor_parallel import plan_ring
from engine.tensor_parallel.plan_ring import RingReader, RingWriter, ring_bytes

CAPACITY = 64


class Ends:
    """Both ends of a ring so small that frames wrap around and exceed it."""

    def __init__(self, num_readers: int) -> None:
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, ring_bytes(num_readers, CAPACITY))
        self.wakes = [os.eventfd(0) for _ in range(num_readers)]
        self.checks = 0
        self.writer = RingWriter(self.fd, self.wakes, self.check, CAPACITY)
        self.readers = [
            RingReader(self.fd, wake, index, num_readers, CAPACITY) for index, wake in enumerate(self.wakes)
        ]

    def check(self) -> None:
        self.checks += 1
        if self.checks > 2:
            raise RuntimeError("a reader is gone")

    def close(self) -> None:
        for end in (self.writer, *self.readers):
            end.close()
        for fd in (self.fd, *self.wakes):
            os.close(fd)


READER = """
import hashlib, sys, time
from engine.tensor_parallel.plan_ring import RingReader
*ends, num_frames = map(int, sys.argv[1:])
reader = RingReader(*ends)
digest = hashlib.sha256()
for number in range(num_frames):
    digest.update(repr(reader.read()).encode())
    if number % 50 == ends[2]:
        time.sleep(0.002)  # fall behind
print(digest.hexdigest())
"""


@pytest.mark.parametrize("num_readers", [1, 3])
def test_every_reader_gets_every_frame_in_order(num_readers: int) -> None:
    """Readers are separate processes, as ranks are."""
    ends = Ends(num_readers)
    ends.writer._check = lambda: None  # the readers take their time to start
    draw = random.Random(num_readers)
    frames = [draw.randbytes(draw.choice([0, 1, 7, 60, 61, 64, 200, 1000])) for _ in range(1000)]
    readers = []
    for index, wake in enumerate(ends.wakes):
        arguments = map(str, (ends.fd, wake, index, num_readers, CAPACITY, len(frames)))
        command = [sys.executable, "-c", READER, *arguments]
        readers.append(subprocess.Popen(command, pass_fds=[ends.fd, wake], stdout=subprocess.PIPE, text=True))
    try:
        for frame in frames:
            ends.writer.write(frame)
        found = [reader.communicate(timeout=200)[0].strip() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert found == [hashlib.sha256(b"".join(repr(frame).encode() for frame in frames)).hexdigest()] * num_readers
    ends.close()


def test_a_full_ring_asks_whether_its_readers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_ring, "CHECK_SECONDS", 0.01)
    ends = Ends(2)
    with pytest.raises(RuntimeError, match="gone"):
        ends.writer.write(b"x" * 200)  # nobody reads
    ends.close()


def test_an_idle_reader_takes_no_processor_time() -> None:
    ends = Ends(1)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(ends.readers[0].read()))
    thread.start()
    assert thread.ident is not None
    its_clock = time.pthread_getcpuclockid(thread.ident)  # other threads of this process may be busy
    before = time.clock_gettime_ns(its_clock)
    time.sleep(0.2)
    assert time.clock_gettime_ns(its_clock) - before < 50_000_000
    ends.writer.write(b"wake up")
    thread.join(60.0)
    assert got == [b"wake up"]
    ends.close()
