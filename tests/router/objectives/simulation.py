"""Two workers, a load and the router's real policies, in simulated time: what placements are worth, in seconds.

Policies, moves, admission of prompt tokens to a step and the learning of step costs are the project's own. A worker
is a loop of steps whose duration is `TRUE_COST`, about what an H200 takes for 7B parameters in bfloat16: a decode row
reads its KV, and a prompt token that of all tokens before it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.step_times import StepCost, num_pairs
from engine.objectives.prompt_budget import PromptBudget, WaitingPrompt
from kvstore.types import WorkerId
from router.objectives.moves import KeptRequest, choose_moves
from router.objectives.objectives import Objectives
from router.objectives.placement import place
from router.routing.admission import AnswerLength
from router.routing.policy import choose
from router.routing.rates import WorkerRates
from router.routing.views import RequestView, WorkerView

TRUE_COST = StepCost(base=0.0043, row=3e-6, context=14e-9, prompt=0.0005, prompt_token=21.5e-6, prompt_context=0.9e-9)
PULL_TOKENS_PER_SECOND = 200_000.0
HAND_OVER_SECONDS = 0.003  # router and front, before a pull begins
MAX_STEP_TOKENS = 8192
MOVE_SECONDS = 0.05


@dataclass(eq=False)
class Request:
    """One request on its way."""

    arrival: float
    num_prompt: int
    num_output: int
    number: int = 0
    times: list[float] = field(default_factory=list)  # of its tokens
    due: float = math.inf
    computed: int = 0  # prompt tokens, on the worker where it is
    last_chunk: int = 0  # of them: KV that a decode worker cannot have pulled before
    kind: str = ""
    next_worker: Worker | None = None  # where it goes with its next token
    began_here: float = 0.0

    @property
    def gap_p99(self) -> float:
        gaps = sorted(after - before for before, after in itertools.pairwise(self.times))
        return gaps[min(int(0.99 * (len(gaps) - 1)) + 1, len(gaps) - 1)] if gaps else 0.0


class Worker:
    """Steps as the scheduler plans them: decode rows, then prompts in the order of arrival."""

    def __init__(self, name: str, role: str, simulation: Simulation, objectives: Objectives) -> None:
        self.worker_id, self.role = WorkerId(name), role
        self.prompts: list[Request] = []
        self.rows: list[Request] = []
        self.expected: set[Request] = set()  # they decode elsewhere, or their KV is on its way
        self.rates = WorkerRates()
        self.times = self.rates.step_times
        self._budget = PromptBudget(objectives.itl) if objectives.itl else None
        self._simulation = simulation
        self._is_running = False
        for number in range(1, 20):  # a warm-up
            self._learn(4 * number, 0, 1000 * number)
            self._learn(4, 50 * number, 1000, num_pairs(0, 50 * number))

    def view(self, now: float) -> WorkerView:
        staying = [request for request in self.prompts if request.next_worker is None]
        decoding = [*self.rows, *self.expected, *staying]
        tokens, pairs, prompts = self.rates.arrivals(now)
        return WorkerView(
            self.worker_id,
            num_running=len(self.rows) + len(self.prompts),
            num_waiting=len(self.expected),
            queued_prefill_tokens=sum(request.num_prompt - request.computed for request in self.prompts),
            pull_tokens_per_second=PULL_TOKENS_PER_SECOND,
            max_num_seqs=256,
            num_slots=256,
            num_rows=len(decoding),
            context_tokens=sum(request.num_prompt + len(request.times) for request in decoding),
            queued_prefill_pairs=sum(num_pairs(r.computed, r.num_prompt - r.computed) for r in self.prompts),
            step=self.times.cost,
            prompt_tokens_per_second=tokens,
            prompt_pairs_per_second=pairs,
            prompts_per_second=prompts,
        )

    def compute(self, request: Request) -> None:
        request.computed = 0
        self.prompts.append(request)
        self.rates.submitted(request.num_prompt, num_pairs(0, request.num_prompt), self._simulation.now)
        self.wake()

    def wake(self) -> None:
        if not self._is_running and (self.rows or self.prompts):
            self._is_running = True
            self._begin_step()

    def _learn(self, num_rows: int, num_tokens: int, context: int, pairs: float = 0.0, factor: float = 1.0) -> None:
        seconds = self._simulation.seconds(num_rows, num_tokens, context, pairs) * factor
        for times in (self.times, *([self._budget.times] if self._budget else [])):
            times.observe(num_rows, num_tokens, seconds, context, pairs)

    def _begin_step(self) -> None:
        rows = self.rows[:256]
        context = sum(request.num_prompt + len(request.times) for request in rows)
        left = MAX_STEP_TOKENS - len(rows)
        self.prompts.sort(key=lambda request: (not request.computed, request.due))
        if self._budget:
            waiting = [WaitingPrompt(r.num_prompt - r.computed, r.computed) for r in self.prompts]
            left = self._budget.num_tokens(len(rows), context, waiting, left)
        num_most, pairs, ended = left, 0.0, []
        for request in self.prompts:
            num_new = min(request.num_prompt - request.computed, left)
            if num_new == 0:
                break
            pairs += num_pairs(request.computed, num_new)
            request.last_chunk = num_new
            request.computed += num_new
            left -= num_new
            if request.computed == request.num_prompt:
                ended.append(request)
        size, factor = (len(rows), num_most - left, context, pairs), self._simulation.random.uniform(0.97, 1.06)
        seconds = self._simulation.seconds(*size) * factor
        self._simulation.after(seconds, lambda: self._end_step(rows, ended, size, factor))

    def _end_step(
        self, rows: list[Request], ended: list[Request], size: tuple[int, int, int, float], factor: float
    ) -> None:
        now = self._simulation.now
        self._learn(*size, factor)
        for request in ended:
            self.prompts.remove(request)
            self.rows.append(request)
            request.began_here = now
        for request in [*rows, *ended]:
            request.times.append(now)
            if len(request.times) == request.num_output:
                self.rows.remove(request)
                self._simulation.ended(request)
            elif request.next_worker is not None:
                self.rows.remove(request)
                self._simulation.pull(request, request.next_worker)
        self._is_running = False
        self.wake()


class Simulation:
    """One cluster under one load. `mode`: aggregated, static or adaptive."""

    def __init__(self, mode: str, objectives: Objectives, seed: int = 0, mixed_seconds: float = 0.0) -> None:
        """mixed_seconds: what a step with prompt tokens beside decode rows takes more than the sum of its parts."""
        self._mixed_seconds = mixed_seconds
        self.now = 0.0
        self.random = random.Random(seed)
        self.done: list[Request] = []
        self.on_end: Callable[[Request], None] = lambda request: None
        self.num_moves = 0
        self._mode = mode
        self._objectives = objectives if mode == "adaptive" else Objectives()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        roles = ("decode", "decode") if mode == "aggregated" else ("prefill", "decode")
        self.workers = {f"w{i}": Worker(f"w{i}", role, self, self._objectives) for i, role in enumerate(roles)}
        self._answers = AnswerLength()

    def seconds(self, num_rows: int, num_tokens: int, context: int, pairs: float) -> float:
        """Mean duration of such a step."""
        mixed = self._mixed_seconds if num_rows and num_tokens else 0.0
        return TRUE_COST.seconds(num_rows, num_tokens, context, pairs) + mixed

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, until: float) -> None:
        if self._mode == "adaptive":
            self.after(MOVE_SECONDS, self._look_at_kept)
        while self._events and self._events[0][0] < until:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def arrive(self, request: Request) -> None:
        view = RequestView(
            request.num_prompt, {}, self._answers.expected(request.num_output), draw=self.random.random()
        )
        workers = self._views("prefill"), self._views("decode")
        if self._objectives:
            chosen = place(view, *workers, 64, self._objectives).chosen
        else:
            chosen = choose("cost", view, *workers, 64).chosen
        request.kind = chosen.kind
        if self._objectives.ttft:
            request.due = self.now + self._objectives.due_seconds(chosen, request.num_prompt, 0.0, has_started=False)
        if chosen.prefill is not None:
            request.next_worker = self.workers[chosen.decode]
            request.next_worker.expected.add(request)
        self.workers[chosen.prefill or chosen.decode].compute(request)

    def pull(self, request: Request, worker: Worker) -> None:
        num_late = request.num_prompt + len(request.times) if request.kind == "kept" else request.last_chunk

        def arrived() -> None:
            worker.expected.discard(request)
            request.next_worker = None
            worker.rows.append(request)
            worker.wake()

        self.after(HAND_OVER_SECONDS + num_late / PULL_TOKENS_PER_SECOND, arrived)

    def ended(self, request: Request) -> None:
        if request.next_worker is not None:
            request.next_worker.expected.discard(request)
        self._answers.observe(request.num_output)
        self.done.append(request)
        self.on_end(request)

    def _views(self, role: str) -> list[WorkerView]:
        return [worker.view(self.now) for worker in self.workers.values() if worker.role == role]

    def _look_at_kept(self) -> None:
        for worker in self.workers.values():
            kept = {str(r.number): r for r in worker.rows if worker.role == "prefill" and r.next_worker is None}
            described = [
                KeptRequest(
                    name, r.num_prompt + len(r.times),
                    self._answers.left(r.num_output, len(r.times)), self.now - r.began_here, len(r.times),
                )
                for name, r in kept.items()
            ]  # fmt: skip
            for move in choose_moves(worker.view(self.now), described, self._views("decode"), self._objectives):
                request = kept[move.choice_id]
                request.next_worker = self.workers[move.chosen.decode]
                request.next_worker.expected.add(request)
                self.num_moves += 1
        self.after(MOVE_SECONDS, self._look_at_kept)


@dataclass(frozen=True)
class Outcome:
    """What came of one run; seconds."""

    output_tokens_per_second: float
    good_per_second: float
    ttft_p99: float
    gap_p99: float
    placements: dict[str, int]
    num_moves: int


def outcome(simulation: Simulation, begin: float, end: float, objectives: Objectives) -> Outcome:
    """Of the requests that ended between `begin` and `end`."""
    done = [request for request in simulation.done if begin <= request.times[-1] < end]
    gaps = sorted(b - a for request in done for a, b in itertools.pairwise(request.times))
    ttfts = sorted(request.times[0] - request.arrival for request in done)
    good = [
        r for r in done if r.times[0] - r.arrival < objectives.ttft and r.gap_p99 < objectives.itl
    ]  # fmt: skip
    kinds = [request.kind for request in done]
    return Outcome(
        sum(request.num_output for request in done) / (end - begin),
        len(good) / (end - begin),
        ttfts[int(0.99 * len(ttfts))],
        gaps[int(0.99 * len(gaps))],
        {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        simulation.num_moves,
    )


def open_loop(
    mode: str,
    objectives: Objectives,
    rate: float,
    lengths: Sequence[tuple[int, int]],
    seconds: float,
    seed: int = 1,
    mixed_seconds: float = 0.0,
) -> Outcome:
    """Poisson arrivals of requests with (prompt, output) tokens drawn from `lengths`."""
    simulation = Simulation(mode, objectives, seed, mixed_seconds)
    rng, time = random.Random(seed), 0.0
    for number in itertools.count():
        time += rng.expovariate(rate)
        if time > seconds:
            break
        request = Request(time, *rng.choice(lengths), number)
        simulation.after(time, lambda request=request: simulation.arrive(request))  # type: ignore[misc]
    simulation.run(seconds)
    return outcome(simulation, 0.25 * seconds, seconds, objectives)


def closed_loop(
    mode: str,
    objectives: Objectives,
    num_clients: int,
    length: tuple[int, int],
    seconds: float,
    seed: int = 1,
    mixed_seconds: float = 0.0,
) -> Outcome:
    """So many clients, each of which sends its next request when it has an answer."""
    simulation = Simulation(mode, objectives, seed, mixed_seconds)
    numbers = itertools.count()

    def send() -> None:
        simulation.arrive(Request(simulation.now, *length, next(numbers)))

    simulation.on_end = lambda request: simulation.after(0.001, send)
    for client in range(num_clients):
        simulation.after(0.002 * client, send)
    simulation.run(seconds)
    return outcome(simulation, 0.4 * seconds, seconds, objectives)
