"""Liveness: whether an engine that loads, or has no heartbeat, is slow or hung, judged by what its process does.

    stopped   (SIGSTOP, a debugger)                         out of service after STOPPED_SECONDS
    blocked   no thread runs, wants to run, or did          out of service after BLOCKED_SECONDS
    computing it used a core, but without heartbeats        out of service after `stall_seconds` of that
    starved   it wants to run and gets no core              never: the machine is busy, the engine is not broken

There are no heartbeats while the engine loads: any work is progress, even for hours, and `StartWatch` measures the
time without work. `ProgressWatch` and `StartWatch` are pure; `sample_process` and `sample_work` read Linux's /proc.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

STOPPED_SECONDS = 1.0
BLOCKED_SECONDS = 3.0
IDLE_SHARE = 0.01  # of an interval: a thread that ran or waited for less did nothing
IDLE_BYTES_PER_SECOND = 64 << 10  # read and written; a waiting process's occasional activity is below this
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """One thread: its state (proc_pid_stat: R, S, D, T, ...), time on a core, time waiting for one."""

    state: str
    run_seconds: float
    wait_seconds: float


Threads = dict[str, ThreadSample]  # of a process, by id; empty: it is gone, or /proc cannot be read


def sample_process(pid: int) -> Threads:
    threads: Threads = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end while it is read
                threads[thread] = _sample_thread(f"/proc/{pid}/task/{thread}")
    return threads


def _sample_thread(folder: str) -> ThreadSample:
    state, run_seconds = _read_stat(folder)
    wait_seconds = 0.0
    with contextlib.suppress(OSError), open(f"{folder}/schedstat") as file:  # finer than ticks, if available
        run_nanos, wait_nanos, _ = file.read().split()
        run_seconds, wait_seconds = int(run_nanos) / 1e9, int(wait_nanos) / 1e9
    return ThreadSample(state, run_seconds, wait_seconds)


def _read_stat(folder: str) -> tuple[str, float]:
    """Return state and time on a core of the thread or process in a folder of /proc."""
    with open(f"{folder}/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before it may contain any characters
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


class ProgressWatch:
    """Call `observe` a few times a second; it returns why the engine is out of service, or None."""

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._heartbeat = -1
        self._before: Threads | None = None  # at the last call, if there has been no heartbeat since
        self._spent = 0.0  # share of the time limit that has been used; 1: all of it
        self._reason: str | None = None

    def has_beaten(self, heartbeat: int) -> bool:
        """Whether the counter has changed since the last call. If so, all is well and no sample is needed."""
        if heartbeat == self._heartbeat:
            return False
        self._heartbeat = heartbeat
        self._before, self._spent, self._reason = None, 0.0, None
        return True

    def observe(self, sample: Threads, elapsed_seconds: float) -> str | None:
        """Judge a process without heartbeats by a sample. elapsed_seconds: since the last call."""
        before, self._before = self._before, sample
        if before is not None:
            spent, reason = self._judge(before, sample, elapsed_seconds)
            self._spent += spent
            if self._spent >= 1.0 and reason:
                self._reason = reason
        return self._reason

    def _judge(self, before: Threads, now: Threads, elapsed: float) -> tuple[float, str]:
        """Return the share of the time limit that this interval uses, and the reason to report."""
        states = {thread.state for thread in now.values()}
        if states and states <= {"T", "t"}:
            return elapsed / STOPPED_SECONDS, "the engine process is stopped"
        ran = waited = 0.0
        for name, thread in now.items():
            last = before.get(name)
            if last is not None:
                ran = max(ran, thread.run_seconds - last.run_seconds)
                waited = max(waited, thread.wait_seconds - last.wait_seconds)
        if ran > IDLE_SHARE * elapsed:
            return min(ran, elapsed) / self._stall_seconds, "the engine computes without progress"
        if "R" in states or waited > IDLE_SHARE * elapsed:
            return 0.0, ""
        return elapsed / BLOCKED_SECONDS, "the engine process is blocked"


@dataclass(frozen=True, slots=True)
class Work:
    """What a process and its descendants have done so far."""

    run_seconds: float = 0.0
    num_bytes: int = 0  # read and written: files, sockets, pipes
    is_runnable: bool = False  # a process runs, or would if it got a core


def sample_work(pid: int) -> Work:
    """Add up the work of a process and its descendants, without those that have ended."""
    run_seconds, num_bytes, is_runnable = 0.0, 0, False
    with contextlib.suppress(OSError, ValueError, IndexError):  # a process may end while it is read
        state, run_seconds = _read_stat(f"/proc/{pid}")
        is_runnable = state == "R"
        with open(f"/proc/{pid}/io") as file:
            num_bytes = sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    work = sample_work(child)
                    run_seconds += work.run_seconds
                    num_bytes += work.num_bytes
                    is_runnable = is_runnable or work.is_runnable
    return Work(run_seconds, num_bytes, is_runnable)


class StartWatch:
    """Call `idle_seconds` about once a second while an engine starts."""

    def __init__(self) -> None:
        self._before: Work | None = None
        self._idle_seconds = 0.0

    def idle_seconds(self, work: Work, elapsed_seconds: float) -> float:
        """Return for how long nothing has been done. elapsed_seconds: since the last call."""
        before, self._before = self._before, work
        if before is not None:
            ran = abs(work.run_seconds - before.run_seconds)  # lower if a child has ended, which is activity, too
            moved = abs(work.num_bytes - before.num_bytes)
            works = ran >= IDLE_SHARE * elapsed_seconds or moved >= IDLE_BYTES_PER_SECOND * elapsed_seconds
            self._idle_seconds = 0.0 if works or work.is_runnable else self._idle_seconds + elapsed_seconds
        return self._idle_seconds
