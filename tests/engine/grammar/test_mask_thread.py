"""A mask that takes too long fails its answer; the step gets the others' and goes on."""

from __future__ import annotations

import threading
import time

from engine.grammar.mask_thread import MaskThread, Task


def spin(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


class Masks:
    def __init__(self) -> None:
        self.done: list[int] = []
        self.failed: list[str] = []

    def compute(self, output: list[int]) -> None:
        spin(output[0] / 1000)
        self.done.append(output[0])

    def task(self, milliseconds: int) -> Task:
        return self.compute, self.failed.append, [milliseconds]


def test_a_slow_mask_is_left_behind_and_the_others_are_computed() -> None:
    thread, masks = MaskThread(), Masks()
    began = time.thread_time()
    thread.run([masks.task(number) for number in (0, 1000, 1, 0)])
    assert masks.done == [0, 1, 0]  # the slow one is still computed somewhere
    [error] = masks.failed
    assert error.startswith("the grammar is too complex: ")
    assert time.thread_time() - began < 0.5
    thread.run([masks.task(0)])
    assert masks.done[-1] == 0


def test_patience_with_slow_masks_runs_out_and_comes_back() -> None:
    thread, masks = MaskThread(), Masks()
    thread.run([masks.task(10)] * 8)
    assert len(masks.failed) >= 3
    time.sleep(0.5)
    thread.run([masks.task(10)])
    assert masks.done[-1] == 10


def test_a_bug_in_one_mask_fails_one_answer() -> None:
    thread, masks = MaskThread(), Masks()

    def broken(output: list[int]) -> None:
        raise KeyError(output)

    thread.run([(broken, masks.failed.append, []), masks.task(0)])
    assert masks.failed == ["its grammar failed (KeyError)"]
    assert masks.done == [0]


def test_a_mask_that_gets_no_core_is_waited_for() -> None:
    """The limit is on processor time, not on wall time."""
    thread, masks, go_on = MaskThread(), Masks(), threading.Event()
    threading.Timer(0.3, go_on.set).start()
    thread.run(
        [(lambda output: masks.done.append(len(output)) if go_on.wait(10.0) else None, masks.failed.append, [])]
    )
    assert masks.done == [0]
    assert not masks.failed
