"""Times of an engine's outputs. The engine is stepped here, so that nothing delays a token's time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from common.errors import EngineError
from engine.engine import Engine
from engine.offline.llm import LLM
from engine.request import Request, SamplingParams

SECONDS = 3.0  # for the rounds of one comparison; no round begins later
MOST_ROUNDS = 3


@dataclass(eq=False, slots=True)
class Timed:
    """One request, with the time of each output."""

    request: Request
    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # of tokens, at these times
    token_ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    def longest_pause(self, start: float, end: float) -> float:
        """Return the longest pause between outputs of which the later is after `start`, the earlier before `end`."""
        pairs = pairwise(self.times)
        return max((after - before for before, after in pairs if after > start and before < end), default=0.0)


class Stepper:
    """Steps one engine with its requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, Timed] = {}

    def add(self, token_ids: Sequence[int], params: SamplingParams) -> Timed:
        sent = time.perf_counter()
        request = self._engine.add_request(token_ids, params)
        timed = self._open[request.request_id] = Timed(request, sent)
        return timed

    def step(self) -> None:
        """Run one step. Raises EngineError if a request fails."""
        outputs = self._engine.step().outputs
        now = time.perf_counter()
        for output in outputs:
            timed = self._open.get(output.request.request_id)
            if timed is None:
                continue
            if output.error is not None:
                raise EngineError(output.error)
            if output.new_token_ids:
                timed.times.append(now)
                timed.counts.append(len(output.new_token_ids))
                timed.token_ids += output.new_token_ids
            timed.has_ended = output.finish_reason is not None

    def run(self, requests: Sequence[Timed]) -> None:
        """Step until all of them have ended."""
        while not all(timed.has_ended for timed in requests):
            self.step()

    def abort(self) -> None:
        """Abort open requests, and finish the steps in flight."""
        for timed in self._open.values():
            if not timed.has_ended:
                self._engine.abort(timed.request.request_id)
        self._open.clear()
        while self._engine.has_work():
            self._engine.step()


def params(num_tokens: int, num_drafts: int | None = 0) -> SamplingParams:
    """Return greedy sampling up to the last token; without drafts unless num_drafts is None."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, num_speculative_tokens=num_drafts)


def decode_speed(engine: Engine, prompts: Sequence[Sequence[int]], each: SamplingParams) -> tuple[float, Timed]:
    """Return the joint tokens per second once each request has its first token, and the first request."""
    stepper = Stepper(engine)
    requests = [stepper.add(prompt, each) for prompt in prompts]
    stepper.run(requests)
    start = max(timed.times[0] for timed in requests)
    later = [
        (at, count) for timed in requests for at, count in zip(timed.times, timed.counts, strict=True) if at > start
    ]
    seconds = max((at for at, _ in later), default=start) - start
    return (sum(count for _, count in later) / seconds if seconds > 0 else 0.0), requests[0]


def random_prompt(llm: LLM, num_tokens: int, seed: object) -> list[int]:
    """Return tokens that no cache contains; at most half of the context."""
    num_tokens = min(num_tokens, llm.engine.max_model_len // 2)
    return random.Random(repr(seed)).choices(range(32, min(llm.model_config.vocab_size, 4000)), k=num_tokens)


def rounds() -> Iterator[int]:
    """Yield numbers of rounds until the time is over; at least one."""
    begin = time.perf_counter()
    for number in range(MOST_ROUNDS):
        yield number
        if time.perf_counter() - begin > SECONDS:
            return
