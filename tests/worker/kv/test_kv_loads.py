"""Loads between scheduler and puller: leases are released; times and reports include pulls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.request import Request, RequestId, SamplingParams
from engine.scheduled_step import KvLoad
from kvstore.handle.handle import PeerLease, open_handle
from kvstore.types import BlockId
from protos import types_pb2 as pb
from tests.kvstore.handle.test_handle import GOOD, changed
from worker.engine_process.figures import OpenRequest
from worker.kv.kv_loads import KvLoads
from worker.messages import Pull, StepReport

REQUEST_ID = RequestId("r")
NUM_BLOCKS = open_handle(GOOD).num_blocks
BLOCK_SIZE = GOOD.num_tokens // NUM_BLOCKS
OK = Pull(REQUEST_ID, True, transport="shm", num_bytes=100, seconds=0.5)
FAILED = Pull(REQUEST_ID, False, "told to fail")


class Parts:
    """Loads between an engine and a puller that record their calls."""

    def __init__(self, kind: type[KvLoads] = KvLoads) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.results: list[tuple[KvLoad, Pull]] = []
        self.report = StepReport()
        kv = SimpleNamespace(
            num_blocks_to_load=lambda num_tokens: -(-num_tokens // BLOCK_SIZE), block_size=BLOCK_SIZE
        )
        remote_kv = SimpleNamespace(prefetch=self._write("add"))
        engine: Any = SimpleNamespace(kv=kv, finish_load=self._write("finish"), remote_kv=remote_kv, counting=[])
        puller: Any = SimpleNamespace(
            keep_alive=self._write("keep"),
            abandon=self._write("abandon"),
            load=self._write("load"),
            take_results=lambda: self.results,
        )
        self.loads = kind(engine, puller, self._write("fence"))
        self.request = Request(REQUEST_ID, list(range(GOOD.num_tokens + 1)), SamplingParams())
        self.open = {REQUEST_ID: OpenRequest(self.request, 1.0, float("inf"))}

    def _write(self, verb: str) -> Any:
        return lambda *args: self.told.append((verb, *args))

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, *_ in self.told]


@pytest.fixture
def parts() -> Parts:
    return Parts()


def accepted(parts: Parts, handle: pb.KvHandle = GOOD) -> PeerLease:
    lease = parts.loads.accept(handle, GOOD.num_tokens, REQUEST_ID)
    assert lease is not None
    return lease


def test_a_handle_on_exactly_these_tokens_is_kept_alive(parts: Parts) -> None:
    assert accepted(parts) == open_handle(GOOD)
    assert parts.verbs == ["keep"]


@pytest.mark.parametrize("num_tokens", [GOOD.num_tokens - 1, GOOD.num_tokens + 1])
def test_a_handle_on_other_tokens_is_let_go(parts: Parts, num_tokens: int) -> None:
    assert parts.loads.accept(GOOD, num_tokens, REQUEST_ID) is None
    assert parts.verbs == ["keep", "abandon"]


def test_a_malformed_handle_is_no_reason_to_fail(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    bad = changed(GOOD, shards=[b"nonsense"])
    assert parts.loads.accept(bad, GOOD.num_tokens, REQUEST_ID) is None
    parts.loads.prefetch(pb.KvOffer(kv_handle=bad))
    assert parts.told == []
    assert "computing the prompt here" in caplog.text


@pytest.mark.parametrize("after_steps", [False, True])
def test_blocks_that_steps_may_use_are_pulled_after_the_fence(parts: Parts, after_steps: bool) -> None:
    lease, blocks = accepted(parts), [BlockId(7), BlockId(8)]
    load = KvLoad(parts.request, lease, [1, 2], blocks, 2 * BLOCK_SIZE)
    start = parts.loads.start_after_steps if after_steps else parts.loads.start
    start([load], parts.open, now=3.0)
    assert parts.told[1:] == [("fence",)] * after_steps + [("load", load)]
    parts.results = [(load, OK)]
    parts.loads.finish(parts.open, parts.report, now=3.5)
    assert parts.report.pulls == [OK]
    assert parts.told[-1] == ("finish", load, True)
    times = parts.open[REQUEST_ID].take_times(now=5.0)
    assert times is not None
    assert (times.queue_seconds, times.kv_pull_seconds, times.prefill_seconds) == (2.0, 0.5, 1.5)
    assert (times.num_pulled_tokens, times.transport, times.kv_pull_failed) == (2 * BLOCK_SIZE, "shm", False)
    assert parts.open[REQUEST_ID].take_times(now=6.0) is None  # they are reported once


def test_a_part_of_a_prompt_is_let_go(parts: Parts) -> None:
    parts.loads.prefetch(pb.KvOffer(kv_handle=GOOD))
    assert parts.told == [("keep", open_handle(GOOD)), ("abandon", open_handle(GOOD))]


def test_a_source_that_caches_make_needless_is_let_go(parts: Parts) -> None:
    lease = accepted(parts)
    parts.loads.start([KvLoad(parts.request, lease, [], [], 0)], parts.open, now=3.0)
    assert parts.verbs == ["keep", "abandon"]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_failed_pull_is_a_fault_unless_its_request_was_cancelled(
    parts: Parts, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load = KvLoad(parts.request, open_handle(GOOD), [0], [BlockId(7)], BLOCK_SIZE)
    parts.results = [(load, FAILED)]
    parts.loads.finish(parts.open if is_open else {}, parts.report, now=2.0)
    assert parts.report.pulls == [FAILED] * is_open
    assert parts.told == [("finish", load, False)]  # its blocks are given back either way
    assert ("told to fail" in caplog.text) == is_open
    assert [record.__dict__["request_id"] for record in caplog.records] == [REQUEST_ID] * is_open
    if is_open:
        times = parts.open[REQUEST_ID].take_times(now=3.0)
        assert times is not None
        assert (times.num_pulled_tokens, times.kv_pull_failed) == (0, True)
