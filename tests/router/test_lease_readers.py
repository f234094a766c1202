"""A lease has one reader, which lets go of it: the router ends a lease only while no decode worker may read it."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from protos import types_pb2 as pb
from router.request import GenerationRequest
from tests.router.pushed import Router, Worker

EVENTS = ("start", "prefilled", "prefilled", "token", "finish", "fail", "lose", "come back", "close", "close")
FAILURES = (pb.FAILURE_CODE_UNAVAILABLE, pb.FAILURE_CODE_RESOURCE_EXHAUSTED, pb.FAILURE_CODE_INTERNAL)


class Leases:
    """Requests through one prefill and two decode workers, whose legs do what they like in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.router = Router(prefill=1, decode=2)
        self.prefill, self.decode = self.router.prefill[0], self.router.decode
        self.requests: list[GenerationRequest] = []
        self.granted: list[str] = []
        self.readers: dict[str, tuple[Worker, str]] = {}  # the last worker that was given the lease, and its leg
        self.let_go: set[str] = set()  # leases whose reader failed, or went, before it was cancelled or had read
        self.has_read: set[tuple[Worker, str]] = set()
        self.num_seen = 0

    def leg(self, workers: list[Worker]) -> tuple[Worker, str] | None:
        legs = [(worker, leg_id) for worker in workers for leg_id in worker.link._legs]
        return self.rng.choice(legs) if legs else None

    def apply(self, event: str) -> None:
        if event == "start":
            self.requests.append(self.router.request(num_choices=self.rng.choice((1, 2)))[0])
        elif event == "close" and self.requests:
            self.requests.pop(self.rng.randrange(len(self.requests))).close()
        elif event == "lose":
            worker = self.rng.choice(self.decode)
            self.forsake(worker, set(worker.link._legs))
            worker.link.lost("killed")
        elif event == "come back":
            for worker in self.decode:
                if worker.link.info is None:
                    worker.come_back()
        elif event == "prefilled" and (found := self.leg([self.prefill])):
            self.prefilled(*found)
        elif found := self.leg(self.decode):
            self.report(event, *found)

    def forsake(self, worker: Worker, leg_ids: set[str]) -> None:
        """These legs end, and with them their reads, if they have not ended before."""
        legs = {(worker, leg_id) for leg_id in leg_ids} - self.has_read
        self.let_go |= {lease for lease, reader in self.readers.items() if reader in legs}

    def prefilled(self, worker: Worker, leg_id: str) -> None:
        self.granted.append(f"lease-{len(self.granted)}")
        handle = pb.KvHandle(lease_id=self.granted[-1], worker_id="p0", epoch=1)
        delta = pb.TokenDelta(request_id=leg_id, token_ids=[72], kv_handle=handle)
        delta.finish_reason = pb.FINISH_REASON_PREFILLED
        worker.link.apply(pb.StepReport(deltas=[delta]))

    def report(self, event: str, worker: Worker, leg_id: str) -> None:
        if event == "fail":
            self.forsake(worker, {leg_id})
            failure = pb.Failure(request_id=leg_id, code=self.rng.choice(FAILURES))
            worker.link.apply(pb.StepReport(failures=[failure]))
        elif event in ("token", "finish"):
            self.has_read.add((worker, leg_id))
            delta = pb.TokenDelta(request_id=leg_id, token_ids=[73])
            if event == "finish":
                delta.finish_reason = pb.FINISH_REASON_LENGTH
            worker.link.apply(pb.StepReport(deltas=[delta]))

    def check(self) -> None:
        """Every release was of a lease that nobody reads, and the first."""
        releases = self.prefill.releases
        assert len(set(releases)) == len(releases)
        for lease in releases[self.num_seen :]:
            assert lease not in self.readers or lease in self.let_go, f"{lease} is being read"
        self.num_seen = len(releases)
        for worker in self.decode:
            for submit in worker.submits:
                lease = submit.kv_handle.lease_id
                if lease and self.readers.get(lease) != (worker, submit.request_id):
                    self.readers[lease] = worker, submit.request_id
                    self.let_go.discard(lease)
            worker.submits.clear()

    def check_end(self) -> None:
        """Every lease has been ended, or has a reader that ends it."""
        while self.requests:
            self.requests.pop().close()
        self.check()
        kept = set(self.granted) - set(self.prefill.releases)
        assert kept <= self.readers.keys() - self.let_go


async def run(events: list[str], rng: random.Random) -> None:
    leases = Leases(rng)
    for event in events:
        leases.apply(event)
        await asyncio.sleep(0)  # what waits for the next turn of the loop
        leases.check()
    leases.check_end()


@given(st.lists(st.sampled_from(EVENTS), max_size=40), st.randoms(use_true_random=False))
def test_a_lease_ends_once_and_never_under_its_reader(events: list[str], rng: random.Random) -> None:
    asyncio.run(run(["start", *events], rng))
