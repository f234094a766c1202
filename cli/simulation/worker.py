"""A worker in simulated time: a real engine, whose runner computes nothing and takes the time of a cost model.

As on a GPU, two steps are in flight: one is planned while the previous one runs, one turn of the engine process's
loop after it began. Whatever comes later waits for the next turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from cli.simulation.clock import Clock
from engine.engine import Engine
from engine.host_tier.kv_manager import TieredKVManager
from engine.kv.manager import KVManager
from engine.kv_groups.block_groups import BlockGroups
from engine.objectives.prompt_budget import PromptBudget
from engine.plan import StepPlan, StepResult, StepSize
from engine.progressive_pulls.remote_kv import ProgressiveRemoteKv
from engine.request import Request
from engine.scheduled_step import KvLoad, StepOutcome, StepStats
from engine.scheduling.scheduler import Scheduler
from engine.simulated.runner import NOISE
from engine.simulated.step_cost import SimulatedCost
from kvstore.pool.block_pool import BlockPool
from kvstore.tier.host_tier import HostTier
from kvstore.types import BlockKey, WorkerId
from protos import types_pb2 as pb
from router.routing.rates import WorkerRates
from router.routing.views import WorkerView
from router.routing.worker_view import Backlog, worker_view
from worker.engine_process.figures import engine_load

FINGERPRINT = "simulated"
TOKEN = 1  # sampled by every step


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Settings of all workers. itl_objective: seconds; 0: none. mixed_seconds: extra time of steps with decode rows
    and prompts. turn_seconds: from the end of a step until the next is planned; pull_seconds: added to it when a pull
    starts. copy_seconds: to copy a block from host memory."""

    cost: SimulatedCost
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    itl_objective: float = 0.0
    mixed_seconds: float = 0.0
    turn_seconds: float = 0.0
    pull_seconds: float = 0.0
    copy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that ends at time `end`."""

    runner: SteppedRunner
    found: StepResult
    end: float

    def result(self) -> StepResult:
        self.runner.now = max(self.runner.now, self.end)
        return self.found


class SteppedRunner:
    """`now` is the engine's time, which is ahead of the simulation's while an engine waits for a step."""

    max_steps_in_flight = 2

    def __init__(self, spec: WorkerSpec, seed: int) -> None:
        self.now = 0.0
        self._spec = spec
        self._end = 0.0  # of the last step
        self._random = random.Random(seed)

    def launch(self, plan: StepPlan) -> _Step:
        """See Runner."""
        size = StepSize.of(plan.rows)
        seconds = self._spec.cost.seconds(size.num_decode_tokens, size.num_prompt_tokens, size.context, size.pairs)
        if size.num_decode_tokens and size.num_prompt_tokens:
            seconds += self._spec.mixed_seconds
        seconds += self._spec.copy_seconds * len(plan.copies_in)
        self._end = max(self._end, self.now) + seconds * self._random.uniform(*NOISE)
        token_ids = [[TOKEN] if row.samples else [] for row in plan.rows]
        empty: list[list[object]] = [[]] * len(plan.rows)  # shared, as they are not modified
        return _Step(self, StepResult(token_ids, empty, empty), self._end)  # type: ignore[arg-type]

    def needs_known_tokens(self, _plan: StepPlan) -> bool:
        return False

    def check(self) -> None:
        """See Runner."""


class SimulatedWorker:
    """An engine, and what the router knows about it."""

    def __init__(
        self, name: str, role: str, spec: WorkerSpec, clock: Clock,
        on_outcome: Callable[[SimulatedWorker, StepOutcome], None], pull: Callable[[SimulatedWorker, KvLoad], None],
        seed: int, host_tier: HostTier | None = None,
    ) -> None:  # fmt: skip
        """on_outcome: gets the outcome of each step after its end. pull: begins a load. host_tier: of the worker's
        host."""
        self.worker_id, self.role = WorkerId(name), role
        self.rates, self.backlog = WorkerRates(), Backlog()
        self.num_legs = 0
        self.num_expected = 0  # requests that will come here once another worker has computed their prompts
        self.pulls_end = {False: 0.0, True: 0.0}  # when pulls for requests, and prefetches, begun so far end
        self._spec, self._clock, self._on_outcome, self._pull = spec, clock, on_outcome, pull
        self._runner = SteppedRunner(spec, seed)
        pool, groups = BlockPool(spec.num_blocks), BlockGroups(spec.block_size)
        self.kv: KVManager = (
            KVManager(pool, spec.block_size, FINGERPRINT)
            if host_tier is None
            else TieredKVManager(pool, groups, FINGERPRINT, host_tier)
        )
        scheduler = Scheduler(
            self.kv,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=1 << 30,
            prompt_budget=PromptBudget(spec.itl_objective) if spec.itl_objective else None,
        )
        self.engine = Engine(
            scheduler, self._runner, vocab_size=1 << 31, eos_token_ids=frozenset(), clock=lambda: self._runner.now
        )
        self._is_busy = False
        self.turn_began = 0.0
        self._has_offers = False  # `Engine.has_work` does not include offers
        self._loaded: list[tuple[KvLoad, float]] = []  # for the next turn, with the start of the turn that planned it
        self._num_steps = 0

    @property
    def assigned(self) -> tuple[int, int]:
        """See WorkerMeter."""
        return self.backlog.prompt_tokens, self.num_legs + self.num_expected

    def expect(self, num_prompt_tokens: int) -> None:
        """Count a request that will come here with its prompt computed."""
        self.num_expected += 1
        self.backlog.expected_tokens += num_prompt_tokens

    def expect_no_more(self, num_prompt_tokens: int) -> None:
        """Count down a request that comes now, or has ended elsewhere."""
        self.num_expected -= 1
        self.backlog.expected_tokens -= num_prompt_tokens

    def submit(self, request: Request) -> None:
        self.engine.submit(request)
        self.wake()

    def prefetch(self, source: object, block_keys: Sequence[BlockKey]) -> None:
        """See ProgressiveRemoteKv."""
        cast("ProgressiveRemoteKv", self.engine.remote_kv).prefetch(source, block_keys)
        self._has_offers = True
        self.wake()

    def finish_load(self, load: KvLoad, began: float) -> None:
        """Take a completed load in the next turn. began: the turn that planned the load."""
        self._loaded.append((load, began))
        self.wake()

    def wake(self) -> None:
        """Look for work, unless a step runs."""
        if not self._is_busy:
            self._turn()

    def view(self) -> WorkerView:
        """Return the router's view of the worker: its report and the router's own counts."""
        report = engine_load(self.engine, self.engine.load(), StepStats(), num_leases=0)
        return worker_view(
            self.worker_id, self.role, self._spec.max_num_seqs, report, self.rates, self.backlog, self.num_legs,
            self.num_expected, self._clock.now,
        )  # fmt: skip

    def _turn(self) -> None:
        loaded, self._loaded = self._loaded, []
        for load, began in loaded:
            if load.owner is not None:  # measured from turn to turn, as in `OpenRequest`
                seconds = self._clock.now - began
                times = pb.RequestTimes(num_pulled_tokens=load.num_tokens, kv_pull_seconds=seconds)
                self.rates.observe_pull(times)
            self.engine.finish_load(load, True)
        self._is_busy = self._has_offers or self.engine.has_work()
        if self._is_busy:
            self._step()

    def _step(self) -> None:
        """Plan a step, and wait for the end of the previous one."""
        self._runner.now = self.turn_began = self._clock.now
        self._has_offers = False
        outcome = self.engine.step(self._pull_all)
        if self._runner.now > self._clock.now or outcome.stats is not None:
            self._clock.at(self._runner.now, partial(self._ended, outcome))
        elif self.engine.num_steps > self._num_steps:  # launched, with room for one more in flight
            self._ended(outcome)
        else:  # it has to wait for a load
            self._is_busy = False
            self._on_outcome(self, outcome)

    def _pull_all(self, loads: Sequence[KvLoad]) -> None:
        for load in loads:
            self._pull(self, load)

    def _ended(self, outcome: StepOutcome) -> None:
        self._num_steps = self.engine.num_steps
        if (stats := outcome.stats) is not None:
            size = stats.size
            self.rates.step_times.observe(
                size.num_decode_tokens, size.num_prompt_tokens, stats.seconds, size.context, size.pairs
            )
            self.backlog.computed(size.num_prompt_tokens, size.pairs)
        self._on_outcome(self, outcome)
        # A puller's thread shares the process with the loop, which continues when the thread waits for bytes.
        num_pulls = sum(bool(load.positions) for load in outcome.loads)
        self._clock.after(self._spec.turn_seconds + num_pulls * self._spec.pull_seconds, self._turn)
