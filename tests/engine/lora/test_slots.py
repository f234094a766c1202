"""Which adapter has a slot; requests ask for one before every step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from common.lora.adapter_ref import AdapterRef
from engine.lora.gpu_slots import SlotStore
from engine.lora.reader import AdapterFile
from engine.request import Request, RequestId, SamplingParams

pytestmark = pytest.mark.wing("engine.lora")
NAMES = [str(AdapterRef(f"{index:032x}", Path(f"/adapters/{index}"))) for index in range(4)]


class Fakes:
    """A store over files that need no reading; records which adapter was put into which slot."""

    def __init__(self, capacity: int, num_steps: int = 2) -> None:
        self.filled: list[tuple[int, AdapterRef]] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.store = SlotStore(self.open_file, self.fill, capacity, num_steps)

    @staticmethod
    def open_file(ref: AdapterRef) -> AdapterFile:
        file: Any = lambda: None  # noqa: E731 - an object that can have attributes
        file.ref, file.changes_head = ref, False
        return cast(AdapterFile, file)

    def fill(self, slot: int, file: AdapterFile) -> None:
        assert self.may_read.wait(10)
        self.filled.append((slot, cast(Any, file).ref))

    def request(self, adapter: int) -> Callable[[], bool]:
        name = NAMES[adapter]
        return self.store.readiness(Request(RequestId(name), [1], SamplingParams(), [], adapter=name))

    def finish_reading(self) -> None:
        for load in self.store._loads.values():
            load.result(10)


def test_a_slot_stays_while_its_request_asks() -> None:
    fakes = Fakes(1)
    running = fakes.request(0)
    fakes.finish_reading()
    waiting = fakes.request(1)
    for _ in range(20):  # steps
        assert running()
        assert not waiting()
    assert fakes.store.get(NAMES[0]) == 0


@pytest.mark.parametrize("num_steps", [2, 4])
def test_it_goes_to_another_when_no_step_in_flight_can_read_it(num_steps: int) -> None:
    fakes = Fakes(1, num_steps)
    running = fakes.request(0)
    fakes.finish_reading()
    waiting = fakes.request(1)
    assert running()
    waiting()  # a step is planned, and runs
    for _ in range(num_steps - 1):
        waiting()  # others without the first request
        assert [*fakes.store._loads] == [NAMES[0]]
    waiting()  # the first step has ended
    assert [*fakes.store._loads] == [NAMES[1]]
    fakes.finish_reading()
    assert waiting()
    assert fakes.filled == [(0, AdapterRef.parse(NAMES[0])), (0, AdapterRef.parse(NAMES[1]))]


def test_the_adapter_that_was_asked_for_longest_ago_leaves() -> None:
    fakes, told = Fakes(2), []
    fakes.store.tell_of_changes(lambda name, is_there: told.append((NAMES.index(name), is_there)))
    first, second = fakes.request(0), fakes.request(1)
    fakes.finish_reading()
    assert second()
    assert first()
    third = fakes.request(2)
    for _ in range(3):
        third()
    assert told == [(0, True), (1, True), (1, False), (2, True)]
    assert not second()  # it came back too soon: nobody's slot is free
    fakes.finish_reading()
    assert third()


def test_what_is_being_read_stays() -> None:
    """A thread writes into its slot."""
    fakes = Fakes(1)
    fakes.may_read.clear()
    fakes.request(0)  # which is aborted at once
    waiting = fakes.request(1)
    for _ in range(10):
        assert not waiting()
    assert [*fakes.store._loads] == [NAMES[0]]
    fakes.may_read.set()
    fakes.finish_reading()
    waiting()
    fakes.finish_reading()
    assert waiting()
