"""The path of a request through a cluster in simulated time: router, prefill, pull, decode.

Chooses with the router's policies, from its index and its counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from cli.client.event_stream import RequestRecord
from cli.load.workload import PlannedRequest
from cli.simulation.clock import Clock
from cli.simulation.specs import ClusterSpec
from cli.simulation.transfers import Lease, Transfers
from cli.simulation.worker import FINGERPRINT, SimulatedWorker
from common.token_ids import pack_ids
from common.wings import require_wing
from engine.request import FinishReason, Request, RequestId, SamplingParams
from engine.scheduled_step import StepOutcome
from kvstore.pool.block_hash import block_keys, root_key
from kvstore.pool.index import PrefixIndex
from kvstore.tier.host_tier import HostTier
from kvstore.types import WorkerId
from router.objectives.adaptive import MOVE_SECONDS
from router.objectives.moves import KeptRequest, choose_moves, tokens_left
from router.objectives.placement import place
from router.routing.policy import Decision, choose
from router.routing.rates import AnswerLength
from router.routing.shortlists.shortlist import shortlist
from router.routing.views import Candidate, RequestView
from router.routing.worker_view import Work


@dataclass(slots=True, eq=False)
class _Choice:
    """One request in progress."""

    planned: PlannedRequest
    prompt: list[int]
    record: RequestRecord
    request_id: RequestId
    decode: SimulatedWorker
    prefill: SimulatedWorker | None
    work: Work
    chosen: Candidate
    began_here: float = 0.0  # time of its first output on the current worker
    num_at_first: int = 0  # output tokens at that time
    num_offered_blocks: int = 0  # blocks of its prompt offered to the decode worker while the rest is computed


def _host_tier(num_blocks: int) -> HostTier | None:
    """Return a host tier whose blocks have no bytes."""
    if not num_blocks:
        return None
    require_wing("kvstore.tier", "--host-tier-blocks")
    from kvstore.tier.host_tier import LocalHostTier

    return LocalHostTier(num_blocks, block_bytes=0)


class SimulatedCluster:
    """Workers, a router, and the records of all finished requests."""

    def __init__(self, spec: ClusterSpec, seed: int = 0) -> None:
        self.clock = Clock()
        self.records: list[RequestRecord] = []
        self.num_decisions: dict[str, int] = {}  # by kind of placement, and "move"
        self._spec = spec
        self._random = Random(seed)
        self._transfers = Transfers(
            self.clock, spec.worker.pull_seconds, spec.pull_tokens_per_second, spec.hop_seconds, seed
        )
        self._index = PrefixIndex()
        self._answers = AnswerLength()
        self._root = root_key(FINGERPRINT)
        self._open: dict[RequestId, _Choice] = {}
        self._kept: dict[RequestId, _Choice] = {}  # kept requests, which may move to a decode worker
        self._turns = itertools.count(1)
        self._others: Iterator[PlannedRequest] = iter(())  # of a closed loop
        self._until = math.inf
        self._sequences: dict[str, itertools.count[int]] = {}
        roles = ["prefill"] * spec.num_prefill + ["decode"] * spec.num_decode
        specs = {"prefill": spec.prefill_worker, "decode": spec.worker}
        hosts = [_host_tier(spec.host_tier_blocks) for _ in range(0, len(roles), spec.workers_per_host)]
        workers = [
            SimulatedWorker(
                f"{role}-{number}",
                role,
                specs[role],
                self.clock,
                self._on_outcome,
                self._transfers.pull,
                seed + number,
                hosts[number // spec.workers_per_host],
            )
            for number, role in enumerate(roles)
        ]
        self._workers = {worker.worker_id: worker for worker in workers}
        self._by_role = {role: [w for w in workers if w.role == role] for role in ("prefill", "decode")}

    def run(self, requests: Iterable[PlannedRequest]) -> None:
        """Send all requests when they are due, and wait for their answers. Prompts are made when sent."""
        self._send_next(iter(requests))
        self.clock.run()

    def run_closed(self, requests: Iterable[PlannedRequest], concurrency: int, until: float = math.inf) -> None:
        """Keep `concurrency` requests open until there are no more, or until a time; wait for their answers."""
        self._others, self._until = iter(requests), until
        for _ in range(concurrency):
            self._send_another(0.0)
        self.clock.run()

    def _send_another(self, now: float) -> None:
        """Send the next request of a closed loop."""
        planned = next(self._others, None) if now < self._until else None
        if planned is not None:
            self.clock.at(now, partial(self._arrive, planned, ()))

    def _send_next(self, requests: Iterable[PlannedRequest]) -> None:
        planned = next(iter(requests), None)
        if planned is not None:
            self.clock.at(planned.at_seconds, partial(self._arrive, planned, requests))

    def _arrive(self, planned: PlannedRequest, others: Iterable[PlannedRequest]) -> None:
        self._send_next(others)
        record = RequestRecord(self.clock.now, self.clock.now)
        self.clock.after(self._spec.hop_seconds + self._spec.accept_seconds, partial(self._dispatch, planned, record))

    # -- the router --------------------------------------------------------------------------------------------

    def _dispatch(self, planned: PlannedRequest, record: RequestRecord) -> None:
        assert not isinstance(planned.prompt, str)  # token ids
        prompt = planned.prompt
        decision = self._decide(prompt, planned.num_output_tokens)
        chosen = decision.chosen
        self.num_decisions[chosen.kind] = self.num_decisions.get(chosen.kind, 0) + 1
        decode = self._workers[chosen.decode]
        prefill = None if chosen.prefill is None else self._workers[chosen.prefill]
        computing = prefill or decode
        work = Work(len(prompt), len(prompt) - chosen.cached_tokens, prefill is None)
        waited = self.clock.now - record.sent
        due_seconds = self._spec.objectives.due_seconds(chosen, work.pending_tokens, waited, has_started=False)
        name = RequestId(f"r{next(self._turns)}")
        self._open[name] = choice = _Choice(planned, prompt, record, name, decode, prefill, work, chosen)
        record.num_prompt_tokens, record.num_output_tokens = len(prompt), planned.num_output_tokens
        computing.num_legs += 1
        computing.backlog.add(work)
        computing.rates.submitted(work.pending_tokens, work.pairs, self.clock.now)
        if prefill is not None:
            decode.expect(len(prompt))
        request = self._request(choice, due_seconds, prefill_only=prefill is not None)
        self.clock.after(self._spec.hop_seconds, partial(computing.submit, request))

    def _decide(self, prompt: list[int], num_output_tokens: int) -> Decision:
        spec, size = self._spec, self._spec.worker.block_size
        keys = block_keys(self._root, pack_ids(prompt), size) if self._index.num_keys else []
        view = RequestView(
            num_tokens=len(prompt),
            cached_tokens={worker: count * size for worker, count in self._index.matches(keys).items()},
            expected_tokens=self._answers.expected(num_output_tokens),
            draw=self._random.random(),
            turn=next(self._turns),
        )
        prefill, decode = (
            [worker.view() for worker in shortlist(spec.policy, self._by_role[role], view)]
            for role in ("prefill", "decode")
        )
        if spec.objectives:
            return place(view, prefill, decode, spec.local_prefill_tokens, spec.objectives)
        return choose(spec.policy, view, prefill, decode, spec.local_prefill_tokens)

    def _request(self, choice: _Choice, due_seconds: float, prefill_only: bool = False) -> Request:
        params = SamplingParams(max_tokens=choice.planned.num_output_tokens, temperature=0.0, ignore_eos=True)
        due = self.clock.now + self._spec.hop_seconds + due_seconds if due_seconds else math.inf
        return Request(choice.request_id, choice.prompt, params, prefill_only=prefill_only, due=due)

    def _watch_kept(self, choice: _Choice) -> None:
        """Check regularly whether the choice should move, as `AdaptiveRoles` does."""
        if not self._kept:
            self.clock.after(MOVE_SECONDS, self._look_at_kept)
        self._kept[choice.request_id] = choice

    def _look_at_kept(self) -> None:
        choices, now = self._kept, self.clock.now
        self._kept = {}
        by_worker: dict[WorkerId, list[KeptRequest]] = {}
        for name, choice in choices.items():
            if name in self._open and choice.prefill is None:
                num_tokens = len(choice.record.chunk_times)
                left = tokens_left(self._answers, choice.planned.num_output_tokens, num_tokens)
                kept = KeptRequest(name, len(choice.prompt) + num_tokens, left, now - choice.began_here, num_tokens)
                by_worker.setdefault(choice.decode.worker_id, []).append(kept)
                self._watch_kept(choice)
        for worker_id, requests in by_worker.items():
            worker, targets = self._workers[worker_id], [target.view() for target in self._by_role["decode"]]
            for move in choose_moves(worker.view(), requests, targets, self._spec.objectives):
                self._move(choices[RequestId(move.choice_id)], worker, self._workers[move.chosen.decode])

    def _move(self, choice: _Choice, worker: SimulatedWorker, target: SimulatedWorker) -> None:
        """Let the worker hand the choice over with its next token."""
        self.num_decisions["move"] = self.num_decisions.get("move", 0) + 1
        choice.prefill, choice.decode = worker, target
        target.expect(choice.work.num_prompt_tokens)
        self.clock.after(self._spec.hop_seconds, partial(worker.engine.hand_over, choice.request_id))

    # -- workers' reports ----------------------------------------------------------------------------------------

    def _on_outcome(self, worker: SimulatedWorker, outcome: StepOutcome) -> None:
        for load in outcome.loads:  # loads that had to wait for steps
            self._transfers.pull(worker, load)
        for chunk in outcome.prompt_chunks:
            choice = self._open[chunk.request.request_id]
            choice.num_offered_blocks = self._transfers.offer(worker, choice.decode, chunk, choice.num_offered_blocks)
        now = self.clock.now + self._spec.hop_seconds  # when the client gets it
        for output in outcome.outputs:
            choice = self._open[output.request.request_id]
            if output.new_token_ids:
                if not choice.began_here:
                    self._began(choice, worker, output.request)
                choice.record.chunk_times.append(now)
            if output.finish_reason is FinishReason.PREFILLED:
                self._hand_over(choice, worker, output.request)
            elif output.finish_reason is not None:
                self._end(choice, worker, now)
        self._feed_index(worker)

    def _began(self, choice: _Choice, worker: SimulatedWorker, request: Request) -> None:
        choice.began_here, choice.num_at_first = self.clock.now, len(choice.record.chunk_times) + 1
        worker.backlog.settle(choice.work)
        if choice.chosen.is_kept and choice.prefill is None:
            self._watch_kept(choice)
        if worker is (choice.prefill or choice.decode):
            choice.record.num_cached_tokens = request.num_cached_tokens

    def _hand_over(self, choice: _Choice, worker: SimulatedWorker, request: Request) -> None:
        """Hand a computed prompt over to the decode worker."""
        num_tokens = request.num_known_tokens - 1
        lease = Lease(worker, worker.kv.detach(request, num_tokens), num_tokens)
        self._leave(choice, worker)
        following = self._request(choice, self._spec.objectives.due_seconds(choice.chosen, 0, 0.0, has_started=True))
        following.output_token_ids = list(request.output_token_ids)
        following.kv_source, following.num_source_tokens = lease, num_tokens
        choice.work, choice.began_here = Work(len(choice.prompt), 0, decodes=True), 0.0
        choice.decode.num_legs += 1
        choice.decode.backlog.add(choice.work)
        self.clock.after(2 * self._spec.hop_seconds, partial(choice.decode.submit, following))

    def _end(self, choice: _Choice, worker: SimulatedWorker, now: float) -> None:
        self._leave(choice, worker)
        num_after_first = choice.planned.num_output_tokens - choice.num_at_first
        if num_after_first > 0:
            worker.rates.observe_answer(num_after_first, self.clock.now - choice.began_here)
        self._finish(choice, now)

    def _leave(self, choice: _Choice, worker: SimulatedWorker) -> None:
        worker.num_legs -= 1
        worker.backlog.remove(choice.work)
        if worker is choice.prefill:
            choice.decode.expect_no_more(choice.work.num_prompt_tokens)

    def _finish(self, choice: _Choice, now: float) -> None:
        del self._open[choice.request_id]
        choice.record.end = now
        self._answers.observe(choice.planned.num_output_tokens)
        self.records.append(choice.record)
        self._send_another(now)

    def _feed_index(self, worker: SimulatedWorker) -> None:
        stored, removed = worker.kv.pool.take_events()
        if stored or removed:
            sequence = self._sequences.setdefault(worker.worker_id, itertools.count(1))
            self._index.apply(worker.worker_id, next(sequence), stored, removed)
