"""A thread that computes a step's masks, and is abandoned together with a mask that takes too long.

The library that computes masks cannot be interrupted. Knows only callables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from common.grammar.grammar import TOO_COMPLEX

# Processor time that steps may wait for slow masks: a budget that refills with time. For schemas written by people
# the slowest mask takes 14 ms, and one in a thousand more than 1.
PATIENCE_SECONDS = 0.02
PATIENCE_PER_SECOND = 0.05
FREE_SECONDS = 0.002  # for each mask, whatever the others took

Task = tuple[Callable[[list[int]], None], Callable[[str], None], list[int]]  # compute, fail, the output so far


class MaskThread:
    """Runs tasks in order on one thread. Several callers may use it, one at a time."""

    def __init__(self) -> None:
        self._runner: _Runner | None = None
        self._patience = PATIENCE_SECONDS
        self._refilled = 0.0  # time of the last refill

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks. Returns when each has been computed or told that it failed."""
        now = time.monotonic()
        self._patience = min(PATIENCE_SECONDS, self._patience + (now - self._refilled) * PATIENCE_PER_SECOND)
        self._refilled = now
        first = 0
        while first < len(tasks):
            if self._runner is None:
                self._runner = _Runner()
            first += self._run_on(self._runner, tasks[first:])

    def _run_on(self, runner: _Runner, tasks: Sequence[Task]) -> int:
        """Run the tasks up to one that takes too long. Returns how many are done."""
        done = runner.submit(tasks, self._patience)
        while True:
            limit = runner.limit
            try:
                done.get(timeout=limit)
                self._patience = max(0.0, self._patience - runner.overspent)
                return len(tasks)
            except Empty:
                index, seconds = runner.progress()
                if seconds > limit and runner.leave(index):
                    self._runner = None
                    self._patience = 0.0
                    _, fail, _ = tasks[index]
                    fail(_too_slow(limit))
                    return index + 1


class _Runner:
    """The thread. If abandoned, it ends after its current task."""

    def __init__(self) -> None:
        self.overspent = 0.0  # beyond FREE_SECONDS, by this batch's finished tasks
        self._patience = 0.0
        self._inbox: SimpleQueue[tuple[Sequence[Task], SimpleQueue[None]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._index = -1  # of the current task
        self._began = 0.0  # the thread's processor time at its start
        self._is_left = False
        self._thread = threading.Thread(target=self._loop, name="grammar-masks", daemon=True)
        self._thread.start()

    def submit(self, tasks: Sequence[Task], patience: float) -> SimpleQueue[None]:
        """Start the tasks. The returned queue gets one item when all have ended."""
        done: SimpleQueue[None] = SimpleQueue()
        self.overspent, self._patience = 0.0, patience
        self._inbox.put((tasks, done))
        return done

    @property
    def limit(self) -> float:
        """Processor time that the current task may take."""
        return max(self._patience - self.overspent, FREE_SECONDS)

    def progress(self) -> tuple[int, float]:
        """Return the current task, or -1, and its processor time so far, which does not grow while it has no core."""
        with self._lock:
            if self._index < 0 or self._thread.ident is None:
                return -1, 0.0
            now = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            return self._index, now - self._began

    def leave(self, index: int) -> bool:
        """Abandon the thread after this task; returns False if the task has ended."""
        with self._lock:
            self._is_left = self._index == index
            return self._is_left

    def _loop(self) -> None:
        while True:
            tasks, done = self._inbox.get()
            ended = time.thread_time()
            for index, (compute, fail, output) in enumerate(tasks):
                with self._lock:
                    self._index, self._began = index, ended
                try:
                    compute(output)
                except Exception as error:  # noqa: BLE001 - a bug fails one answer; the step waits for this thread
                    fail(f"its grammar failed ({type(error).__name__})")
                ended = time.thread_time()
                with self._lock:
                    self._index = -1
                    if self._is_left:
                        return
                seconds = ended - self._began
                if seconds > self.limit:  # it ended before the caller checked
                    fail(_too_slow(self.limit))
                self.overspent += max(0.0, seconds - FREE_SECONDS)
            done.put(None)


def _too_slow(limit: float) -> str:
    return f"{TOO_COMPLEX}: a mask takes more than {limit * 1e3:.0f} ms"
