"""Measurements of one worker: its speed and its backlog."""

from __future__ import annotations

import time

from common.token_ids import num_ids
from kvstore.types import WorkerId
from protos import types_pb2 as pb
from router.routing.rates import WorkerRates
from router.routing.views import WorkerView
from router.routing.worker_view import Backlog, Work, worker_view
from router.workers.worker_link import Leg, Meter, WorkerLink


class WorkerMeter(Meter):
    """Measures the worker of a link. The backlog is the work of open legs."""

    def __init__(self, link: WorkerLink) -> None:
        super().__init__(link)
        self.rates, self.backlog = WorkerRates(), Backlog()
        self._work: dict[str, Work] = {}  # by leg
        self._expected: dict[str, int] = {}  # prompt tokens, by leg on another worker

    @property
    def worker_id(self) -> WorkerId:
        return self._link.worker_id

    @property
    def assigned(self) -> tuple[int, int]:
        """Prompt tokens to compute and number of requests, as the router counts them."""
        return self.backlog.prompt_tokens, self._link.num_open + self._link.num_expected

    def view(self) -> WorkerView:
        """Return the policy's view of the worker."""
        link = self._link
        max_num_seqs = link.info.max_num_seqs if link.info else 1
        return worker_view(
            link.worker_id, link.role, max_num_seqs, link.load, self.rates, self.backlog, link.num_open,
            link.num_expected, time.monotonic(),
        )  # fmt: skip

    def submitted(self, leg: Leg, message: pb.Submit, num_new_tokens: int) -> None:
        work = Work(num_ids(message.prompt_token_ids), num_new_tokens, message.keep)
        self._work[leg.leg_id] = work
        self.backlog.add(work)
        self.rates.submitted(num_new_tokens, work.pairs, leg.opened)
        if leg.next_link is not None:
            meter_of(leg.next_link).expect(leg, work)

    def handed_over(self, leg: Leg) -> None:
        """A leg will go on at its `next_link`, which it had not when it was opened."""
        assert leg.next_link is not None
        meter_of(leg.next_link).expect(leg, self._work[leg.leg_id])

    def expect(self, leg: Leg, work: Work) -> None:
        """Count a leg on another worker that will continue here."""
        self._expected[leg.leg_id] = work.num_prompt_tokens
        self.backlog.expected_tokens += work.num_prompt_tokens

    def expect_no_more(self, leg: Leg) -> None:
        """Remove such a leg, which has ended. Does nothing if the worker has served another model since."""
        self.backlog.expected_tokens -= self._expected.pop(leg.leg_id, 0)

    def began(self, leg: Leg, times: pb.RequestTimes) -> None:
        self.backlog.settle(self._work[leg.leg_id])
        self.rates.observe_pull(times)

    def ended(self, leg: Leg) -> None:
        self.backlog.remove(self._work.pop(leg.leg_id))
        if leg.next_link is not None:
            meter_of(leg.next_link).expect_no_more(leg)

    def stepped(self, load: pb.LoadReport) -> None:
        self.rates.observe_load(load)
        self.backlog.computed(load.step_prefill_tokens, load.step_prompt_pairs)


def meter_of(link: WorkerLink) -> WorkerMeter:
    """Return the meter of a link's worker."""
    assert isinstance(link.meter, WorkerMeter)  # this wing sets the meter
    return link.meter
