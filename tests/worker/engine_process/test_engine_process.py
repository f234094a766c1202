"""The loop of the engine process, run in this process over a scripted link."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.token_ids import pack_ids
from engine.assembly import assemble
from engine.config import EngineConfig
from protos import types_pb2 as pb
from worker.engine_process.process import IDLE_WAIT_SECONDS, EngineProcess
from worker.messages import Command, StepReport, Stop


class Peers:
    """Peers without leases, exports or loads."""

    num_open = 0

    def __len__(self) -> int:
        return 0

    def expire(self, now: float) -> list[Any]:
        return []

    def __init__(self) -> None:
        self.abandoned: list[Any] = []

    def accept(self, handle: pb.KvHandle | None, num_tokens: int, request_id: str) -> pb.KvHandle | None:
        return handle

    def abandon(self, source: object) -> None:
        self.abandoned.append(source)

    def finish(self, requests: Any, report: Any, now: float) -> None:
        pass

    def lease_parts(self, chunks: Any, requests: Any, now: float) -> list[Any]:
        return []

    def start(self, loads: Any, requests: Any, now: float) -> None:
        pass

    start_after_steps = start

    def close(self) -> None:
        pass


class Link:
    """A link on which time passes only in `receive`, when no message is there."""

    def __init__(self, script: list[list[Any]]) -> None:
        self.now = 100.0
        self.script = script
        self.reports: list[StepReport] = []

    def receive(self, wait: float) -> list[Any]:
        if wait == 0.0:
            return []
        messages = self.script.pop(0)
        self.now += 0.0 if messages else wait
        return messages

    def send(self, report: StepReport) -> None:
        self.reports.append(report)


def sent(submit: pb.Submit) -> Command:
    return Command(pb.Command(submit=submit).SerializeToString())


def submit(name: str, due_seconds: float = 0.0) -> Command:
    sampling = pb.SamplingParams(max_tokens=3, ignore_eos=True)
    message = pb.Submit(prompt_token_ids=pack_ids(range(20)), sampling=sampling, due_seconds=due_seconds, keep=True)
    message.request_id = name
    return sent(message)


def test_the_pool_is_checked_when_no_request_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking all blocks takes longer than a step: requests that follow each other must not wait for that."""
    parts = assemble(EngineConfig("dry-run", num_gpu_blocks=64))
    link, peers = Link([[submit("a")], [submit("b")], [], [], [], [submit("c")], [], [], [Stop()]]), Peers()
    checks: list[tuple[float, int]] = []
    monkeypatch.setattr(time, "monotonic", lambda: link.now)
    monkeypatch.setattr(parts.engine.kv.pool, "check_integrity", lambda: checks.append((link.now, len(link.reports))))
    process = EngineProcess(link, parts.engine, peers, peers, peers, lambda: None)  # type: ignore[arg-type]
    process.run()
    ends = [delta.request_id for report in link.reports for delta in report.deltas if delta.finish_reason]
    assert ends == ["a", "b", "c"]
    assert [now - 100.0 for now, _ in checks] == [IDLE_WAIT_SECONDS, 4 * IDLE_WAIT_SECONDS]


@pytest.mark.wing("engine.priorities")
def test_overdue_requests_are_served_first_and_those_without_objective_last() -> None:
    parts = assemble(EngineConfig("dry-run", num_gpu_blocks=64, max_num_seqs=1))
    come = [submit("plain"), submit("due", 0.5), submit("overdue", -60.0)]
    link, peers = Link([come, [Stop()]]), Peers()
    EngineProcess(link, parts.engine, peers, peers, peers, lambda: None).run()  # type: ignore[arg-type]
    ends = [delta.request_id for report in link.reports for delta in report.deltas if delta.finish_reason]
    assert ends == ["overdue", "due", "plain"]


def test_bad_sampling_parameters_are_refused_and_the_peers_lease_let_go() -> None:
    sampling, handle = pb.SamplingParams(max_tokens=1, temperature=-1.0), pb.KvHandle(lease_id="lease", num_tokens=1)
    prompt = pack_ids([1, 2])
    message = pb.Submit(request_id="a", prompt_token_ids=prompt, sampling=sampling, kv_handle=handle)
    parts, peers = assemble(EngineConfig("dry-run", num_gpu_blocks=64)), Peers()
    link = Link([[sent(message)], [Stop()]])
    EngineProcess(link, parts.engine, peers, peers, peers, lambda: None).run()  # type: ignore[arg-type]
    [failure] = [pb.Failure.FromString(data) for report in link.reports for data in report.failures]
    assert (failure.request_id, failure.code, failure.param) == ("a", pb.FAILURE_CODE_INVALID_ARGUMENT, "temperature")
    assert [handle.lease_id for handle in peers.abandoned] == ["lease"]
