"""Measurements from running requests: a worker's speed, a model's answer lengths, and how fast its queue drains.

Moving averages that adapt within a few requests. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.step_times import StepTimes
from protos import types_pb2 as pb
from router.routing.views import EXPECTED_TOKENS

WEIGHT = 0.2  # of the newest measurement
ARRIVAL_SECONDS = 3.0  # averaging time for arriving prompt tokens: over 1 s, a single prompt looks like a flood
OLD_SECONDS = 10.0  # without a request, after which rates are old
ANSWER_WEIGHT = 0.05  # of the newest answer in the mean length
FADE_SECONDS = 5.0  # while choices wait, the time after which a first token counts for 1/e in the drain rate


@dataclass(slots=True)
class WorkerRates:
    """Measured rates of one worker; 0: not measured yet."""

    pull_tokens_per_second: float = 0.0
    token_seconds: float = 0.0  # between an answer's tokens, including steps with prompts and all other delays
    step_times: StepTimes = field(default_factory=StepTimes)
    num_decoded: int = 0  # tokens of answers, in the observed steps
    num_computed: int = 0  # prompt tokens, in these steps
    _arrived: float = 0.0  # prompt tokens, decayed
    _arrived_pairs: float = 0.0  # pairs of these: each token with every token before it
    _num_arrived: float = 0.0  # prompts
    _last_arrival: float = 0.0

    def observe_pull(self, times: pb.RequestTimes) -> None:
        """Update from the times that came with a request's first delta."""
        if times.num_pulled_tokens and times.kv_pull_seconds > 0 and not times.kv_pull_failed:
            self.pull_tokens_per_second = _mix(
                self.pull_tokens_per_second, times.num_pulled_tokens / times.kv_pull_seconds
            )

    def observe_answer(self, num_tokens: int, seconds: float) -> None:
        """Update from an answer that got `num_tokens` after its first ones within `seconds`."""
        if num_tokens > 0:
            self.token_seconds = _mix(self.token_seconds, seconds / num_tokens)

    def observe_load(self, load: pb.LoadReport) -> None:
        """Update from a step."""
        self.num_decoded += load.step_decode_tokens
        self.num_computed += load.step_prefill_tokens
        self.step_times.observe(
            load.step_decode_tokens,
            load.step_prefill_tokens,
            load.step_seconds,
            load.step_context_tokens,
            load.step_prompt_pairs,
        )

    def submitted(self, num_prompt_tokens: int, pairs: float, now: float) -> None:
        """Count prompt tokens sent to the worker to be computed."""
        kept = self._kept_since(now)
        self._arrived = self._arrived * kept + num_prompt_tokens
        self._arrived_pairs = self._arrived_pairs * kept + pairs
        self._num_arrived = self._num_arrived * kept + (num_prompt_tokens > 0)
        self._last_arrival = now

    def are_old(self, now: float) -> bool:
        """Whether the last request was so long ago that the worker's speed may have changed."""
        return 0.0 < self._last_arrival < now - OLD_SECONDS

    def arrivals(self, now: float) -> tuple[float, float, float]:
        """Return arriving prompt tokens, their pairs and prompts per second, averaged over about ARRIVAL_SECONDS."""
        kept = self._kept_since(now) / ARRIVAL_SECONDS
        return self._arrived * kept, self._arrived_pairs * kept, self._num_arrived * kept

    def _kept_since(self, now: float) -> float:
        return math.exp((self._last_arrival - now) / ARRIVAL_SECONDS)


class AnswerLength:
    """Mean number of tokens in answers; 0: none yet."""

    def __init__(self) -> None:
        self.mean = 0.0

    def observe(self, num_tokens: int) -> None:
        self.mean = num_tokens if self.mean == 0 else self.mean + ANSWER_WEIGHT * (num_tokens - self.mean)

    def expected(self, max_tokens: int) -> float:
        """Return the expected length of an answer with at most `max_tokens`."""
        return min(self.mean or EXPECTED_TOKENS, max_tokens)


class DrainRate:
    """Rate of first tokens while choices wait, which is the rate at which a model's queue drains."""

    def __init__(self) -> None:
        self._num_left = 0.0  # number of first tokens, and below the time that they took, both decayed
        self._seconds = 0.0
        self._since = 0.0  # time of the last first token, or when the queue began

    def began(self, now: float) -> None:
        """Note that a choice waits, and the queue was empty before."""
        self._since = max(self._since, now)

    def observe(self, now: float) -> None:
        """Count a first token."""
        interval = now - self._since
        kept = math.exp(-interval / FADE_SECONDS)
        self._num_left = kept * self._num_left + 1
        self._seconds = kept * self._seconds + interval
        self._since = now

    def seconds(self, num_waiting: int, now: float) -> float:
        """Predict the time until `num_waiting` choices have their first tokens; 0 before the first measurement."""
        if not self._num_left:
            return 0.0
        return num_waiting * (self._seconds + now - self._since) / self._num_left


def _mix(old: float, new: float) -> float:
    return new if old == 0 else old + WEIGHT * (new - old)
