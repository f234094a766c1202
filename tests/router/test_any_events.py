"""Whatever workers and clients do, in any order: no token is lost or shown twice, and every lease ends once.

A lease has one reader, which lets go of it: the router ends a lease only while no decode worker may read it.
"""

from __future__ import annotations

import asyncio
import random
import string

from hypothesis import given
from hypothesis import strategies as st

from protos import types_pb2 as pb
from router.choice import Choice, State
from router.request import GenerationRequest
from tests.router.pushed import PART, Listener, Router, Worker

EVENTS = (
    *("start", "offer", "prefilled", "prefilled", "token", "token", "end", "fail", "close"),
    *("lose", "lose", "come back", "come back"),
)
FAILURES = (pb.FAILURE_CODE_UNAVAILABLE, pb.FAILURE_CODE_RESOURCE_EXHAUSTED, pb.FAILURE_CODE_INTERNAL)
Leg = tuple[Worker, str]


class Requests:
    """Requests through workers whose legs do anything. Token n of a text is letter n.

    One prefill worker, the keeper, is never lost: the ends of its leases are followed.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.router = Router(prefill=2, decode=2, max_retries=1000)
        self.prefill, self.decode = self.router.prefill, self.router.decode
        self.keeper, *self.mortal = [*self.prefill, *self.decode]
        self.requests: list[tuple[GenerationRequest, list[Choice], Listener]] = []
        self.closed: set[int] = set()
        self.broken: set[int] = set()  # by a failure that is not recovered
        self.submits: dict[str, pb.Submit] = {}
        self.num_tokens: dict[str, int] = {}  # of each leg
        self.granted: set[str] = set()
        self.readers: dict[str, Leg] = {}  # the last worker that was given the lease, and its leg
        self.let_go: set[str] = set()  # leases whose reader failed, or went, before it was cancelled or had read
        self.has_read: set[Leg] = set()
        self.num_seen = 0

    def legs(self, workers: list[Worker]) -> list[Leg]:
        return [(worker, leg_id) for worker in workers for leg_id in worker.link._legs]

    def apply(self, event: str) -> None:
        if event == "start":
            request, sink = self.router.request(self.rng.randint(1, 2), self.rng.randint(1, 2))
            self.requests.append((request, list(request.choices), sink))
        elif event == "close":
            if left := [*set(range(len(self.requests))) - self.closed]:
                number = self.rng.choice(left)
                self.closed.add(number)
                self.requests[number][0].close()
        elif event == "lose":
            worker = self.rng.choice(self.mortal)
            self.forsake(set(self.legs([worker])))
            worker.link.lost("killed")
        elif event == "come back":
            self.come_back(self.rng.choice(self.mortal))
        elif legs := self.legs({"offer": self.prefill, "prefilled": self.prefill}.get(event, self.decode)):
            self.report(event, *self.rng.choice(legs))

    def come_back(self, *workers: Worker) -> None:
        for worker in workers:
            if worker.link.info is None:
                worker.come_back()

    def forsake(self, legs: set[Leg]) -> None:
        """End these legs and their reads, unless they have ended before."""
        self.let_go |= {lease for lease, reader in self.readers.items() if reader in legs - self.has_read}

    def report(self, event: str, worker: Worker, leg_id: str) -> None:
        if event == "offer":
            worker.link.apply(pb.StepReport(kv_offers=[pb.KvOffer(request_id=leg_id, kv_handle=PART)]))
            return
        if event == "fail":
            self.forsake({(worker, leg_id)})
            failure = pb.Failure(request_id=leg_id, code=self.rng.choice(FAILURES))
            if failure.code == pb.FAILURE_CODE_INTERNAL:
                self.broken.add(int(leg_id[1:].partition("-")[0]) - 1)
            worker.link.apply(pb.StepReport(failures=[failure]))
            return
        count = len(self.submits[leg_id].output_token_ids) + self.num_tokens.get(leg_id, 0)
        self.num_tokens[leg_id] = self.num_tokens.get(leg_id, 0) + 1
        delta = pb.TokenDelta(request_id=leg_id, token_ids=[65 + count % 26])
        if event == "prefilled":
            delta.finish_reason = pb.FINISH_REASON_PREFILLED
            lease = f"lease of {leg_id}"
            delta.kv_handle.CopyFrom(pb.KvHandle(lease_id=lease, worker_id=worker.info.worker_id, epoch=1))
            self.granted |= {lease} if worker is self.keeper else set()
        else:
            self.has_read.add((worker, leg_id))
            if event == "end":
                delta.finish_reason = pb.FINISH_REASON_LENGTH
        worker.link.apply(pb.StepReport(deltas=[delta]))

    def check_leases(self) -> None:
        """Check that every release was the first of its lease, which nobody reads."""
        releases = self.releases()
        assert len(set(releases)) == len(releases)
        for lease in releases[self.num_seen :]:
            assert lease not in self.readers or lease in self.let_go, f"{lease} is being read"
        self.num_seen = len(releases)
        for worker in (*self.prefill, *self.decode):
            for submit in worker.submits:
                self.submits[submit.request_id] = submit
                if lease := submit.kv_handle.lease_id:
                    self.readers[lease] = worker, submit.request_id
                    self.let_go.discard(lease)
            worker.submits.clear()

    def releases(self) -> list[str]:
        return [lease for lease in self.keeper.releases if lease != PART.lease_id]

    async def finish(self) -> None:
        """Run every request to its end; check that every lease has ended or has a reader that will end it."""
        self.come_back(*self.mortal)
        await self.settle()
        while self.legs(self.prefill) + self.legs(self.decode):
            for event, workers in (("prefilled", self.prefill), ("end", self.decode)):
                for worker, leg_id in self.legs(workers):
                    if leg_id in worker.link._legs:
                        self.report(event, worker, leg_id)
                        await self.settle()
        kept = self.granted - set(self.releases())
        assert kept <= self.readers.keys() - self.let_go

    async def settle(self) -> None:
        await asyncio.sleep(0)  # what waits for the next turn of the loop
        self.check_leases()

    def check_texts(self) -> None:
        assert self.router.is_quiet()
        for number, (_, choices, sink) in enumerate(self.requests):
            for choice in choices:
                shown = sink.text(choice.index)
                assert shown == string.ascii_uppercase[: len(shown)]
                assert bytes(choice.journal.output_token_ids).decode() == shown
                assert choice.state is State.DONE
            if number not in self.closed | self.broken:
                assert not sink.errors
                assert sorted(sink.ends()) == [(choice.index, "length", None) for choice in choices]


async def run(events: list[str], rng: random.Random) -> None:
    requests = Requests(rng)
    for event in ["start", *events]:
        requests.apply(event)
        await requests.settle()
    await requests.finish()
    requests.check_texts()


@given(st.lists(st.sampled_from(EVENTS), min_size=30, max_size=80), st.randoms(use_true_random=False))
def test_no_token_is_lost_or_shown_twice_and_a_lease_ends_once_and_never_under_its_reader(
    events: list[str], rng: random.Random
) -> None:
    asyncio.run(run(events, rng))
