"""Busy engines share the cores equally; the share of one that dies goes to the others."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from worker.cores.shared_cores import NUM_SLOTS, SharedCores, join_cores

HOLDER = """
import sys
from pathlib import Path
from worker.cores.shared_cores import SharedCores
print(SharedCores(Path(sys.argv[1]), 8).share(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def test_those_that_compute_divide_the_cores(path: Path) -> None:
    first, second, third = (SharedCores(path, 8) for _ in range(3))
    assert first.share() == 8
    assert (second.share(), first.share()) == (4, 4)
    assert (third.share(), first.share()) == (2, 2)
    second.release()
    assert (first.share(), third.share()) == (4, 4)
    third.close()
    assert first.share() == 8


def test_each_has_at_least_one_core(path: Path) -> None:
    engines = [SharedCores(path, 2) for _ in range(NUM_SLOTS + 3)]  # more than there are slots for
    assert [engine.share() for engine in engines] == [2] + [1] * (NUM_SLOTS + 2)
    assert {engine.share() for engine in engines} == {1}
    for engine in engines:
        engine.release()
    assert engines[-1].share() == 2


def test_a_killed_engine_does_not_count(path: Path) -> None:
    engine = SharedCores(path, 8)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert int(holder.stdout.readline()) == 8
            assert engine.share() == 4
        finally:
            holder.kill()
            holder.wait()
    assert engine.share() == 8


def test_a_folder_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("worker.cores.shared_cores.fcntl.fcntl", refuse)
    with pytest.raises(ConfigError, match="Invalid argument; or give --num-threads"):
        join_cores(str(tmp_path))


def test_threads_of_torch_follow(path: Path) -> None:
    before = torch.get_num_threads()
    engine, other = SharedCores(path, 2), SharedCores(path, 2)
    try:
        engine.adjust(has_work=True)
        assert torch.get_num_threads() == 2
        other.share()
        engine.adjust(has_work=True)
        assert torch.get_num_threads() == 1
        engine.adjust(has_work=False)
        assert other.share() == 2
    finally:
        torch.set_num_threads(before)
