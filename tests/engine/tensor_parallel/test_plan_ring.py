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
    """A small ring: frames wrap around and exceed it."""

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


@pytest.mark.parametrize("num_readers", [1, 3])
def test_every_reader_gets_every_frame_in_order(num_readers: int) -> None:
    ends = Ends(num_readers)
    draw = random.Random(num_readers)
    frames = [draw.randbytes(draw.choice([0, 1, 7, 60, 61, 64, 200, 1000])) for _ in range(400)]
    got: list[list[bytes]] = [[] for _ in ends.readers]

    def read(index: int) -> None:
        for number in range(len(frames)):
            got[index].append(ends.readers[index].read())
            if number % 50 == index:
                time.sleep(0.002)  # fall behind

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    for frame in frames:
        ends.writer.write(frame)
    for thread in threads:
        thread.join(100.0)
        assert not thread.is_alive()
    assert all(frames_of_one == frames for frames_of_one in got)
    ends.close()


READER = """
import hashlib, sys
from engine.tensor_parallel.plan_ring import RingReader
memory, wake, capacity = map(int, sys.argv[1:])
reader = RingReader(memory, wake, 0, 1, capacity)
digest = hashlib.sha256()
for _ in range(3000):
    digest.update(reader.read())
print(digest.hexdigest())
"""


def test_a_reader_in_another_process() -> None:
    ends = Ends(1)
    descriptors = [ends.fd, ends.wakes[0]]
    arguments = [str(number) for number in (*descriptors, CAPACITY)]
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, *arguments], pass_fds=descriptors, stdout=subprocess.PIPE, text=True
    )
    try:
        ends.writer._check = lambda: None  # the reader takes its time to start
        expected = hashlib.sha256()
        for number in range(3000):
            frame = bytes([number % 256]) * (number % 200)
            expected.update(frame)
            ends.writer.write(frame)
        output, _ = reader.communicate(timeout=200)
    finally:
        reader.kill()
    assert output.strip() == expected.hexdigest()
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
