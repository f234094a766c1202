"""Scheduling policies: the order of service, who is admitted and who is preempted. An extension point.

A policy is a class without arguments, chosen by `--scheduling-policy`: `priority`, `fcfs` or `module:Class`. Its
methods are pure functions of small read-only views: no I/O, no clock, no state. The scheduler asks each of them only
when its answer matters, so that a policy costs nothing in steps in which nobody waits. It cannot cause a deadlock or
a livelock, whatever it answers: see docs/decisions/scheduling-and-preemption.md.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass
from typing import Protocol

from common.errors import ConfigError
from engine.request import Request

logger = logging.getLogger(__name__)

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestView:
    """Read-only view of a request."""

    priority: int  # lower is more urgent
    arrival: int  # 0, 1, 2, ...: a clock that ticks once per request
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int  # most output tokens that it may have
    num_computed_tokens: int = 0  # their KV exists
    num_preemptions: int = 0
    due: float = math.inf  # seconds on a clock of the worker's, when the next token is due; inf: no objective


@dataclass(frozen=True, slots=True)
class EngineView:
    """Read-only view of the engine."""

    num_free_blocks: int  # cached ones included, because they can be evicted
    num_blocks: int
    block_size: int  # tokens
    num_running: int
    num_waiting: int  # swapped ones included


class SchedulingPolicy(Protocol):
    """Whom to serve first, whom to admit, and who gives way to whom."""

    def key(self, request: RequestView) -> Rank:
        """Rank of a request: the smallest is served first; when blocks run out, the largest gives way.

        Asked once, when the request arrives. Of equal keys the earlier arrival comes first.
        """
        ...

    def admits(self, request: RequestView, engine: EngineView) -> bool:
        """Whether the first in line may start now, though there is room; those behind it wait with it.

        Not asked when nothing runs: then the request starts.
        """
        ...

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        """Whether `newcomer` takes the place of a running request, or passes a swapped one, that ranks behind it."""
        ...


class FcfsPolicy:
    """First come, first served, whatever the priority says. Nobody gives way to a newcomer."""

    def key(self, request: RequestView) -> Rank:
        return (request.arrival,)

    def admits(self, request: RequestView, engine: EngineView) -> bool:
        return True

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        return False


class PriorityPolicy(FcfsPolicy):
    """Lower `priority` first, and at once: it takes the place of a higher one.

    Among equal priorities those whose next token is due first: requests with slack wait for those at risk. Without
    objectives, FCFS.
    """

    def key(self, request: RequestView) -> Rank:
        return (request.priority, request.due, request.arrival)

    def preempts(self, newcomer: RequestView, other: RequestView) -> bool:
        return newcomer.priority < other.priority


SHIPPED: dict[str, type[SchedulingPolicy]] = {"priority": PriorityPolicy, "fcfs": FcfsPolicy}


class GuardedPolicy:
    """A policy whose failure is logged once and has no other effect.

    After its first exception, or answer that is none, this one no longer asks it: requests rank as with
    `PriorityPolicy`, and nobody gives way to a newcomer. The scheduler resets it before its next step.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.has_failed = False
        self._policy: SchedulingPolicy = policy

    def reset(self) -> None:
        """Go on with the default policy. All requests are to be ranked anew."""
        self.has_failed = False
        self._policy = PriorityPolicy()

    def rank(self, request: Request) -> Rank:
        """The policy's key, made unique by the order of arrival."""
        key: Rank | None = None
        if not self.has_failed:
            try:
                key = checked_key(self._policy.key(_view(request)))
            except Exception:  # noqa: BLE001 - a user's code: whatever it raises, the engine goes on
                self._give_up()
        return (*(PriorityPolicy().key(_view(request)) if key is None else key), request.arrival)

    def admits(self, request: Request, engine: EngineView) -> bool:
        if not self.has_failed:
            try:
                return bool(self._policy.admits(_view(request), engine))
            except Exception:  # noqa: BLE001 - as above
                self._give_up()
        return True

    def gives_way(self, other: Request, newcomer: Request) -> bool:
        """Whether `newcomer` goes before `other`. Only ever down the ranks: no two can displace each other."""
        if newcomer.rank < other.rank and not self.has_failed:
            try:
                return bool(self._policy.preempts(_view(newcomer), _view(other)))
            except Exception:  # noqa: BLE001 - as above
                self._give_up()
        return False

    def _give_up(self) -> None:
        """Log the exception being handled and fall back to the default policy."""
        self.has_failed = True
        name = type(self._policy).__name__
        logger.exception("scheduling policy %s failed; the engine goes on with the policy 'priority'", name)


def checked_key(key: object) -> Rank:
    """`key` if it can be sorted with others. Raises TypeError."""
    if isinstance(key, tuple) and all(isinstance(part, int | float) and not math.isnan(part) for part in key):
        return key
    raise TypeError(f"key must return a tuple of numbers, not {key!r}")


def load_policy(name: str) -> SchedulingPolicy:
    """The policy that `--scheduling-policy` names, tried on an example. Raises ConfigError."""
    flag = f"--scheduling-policy {name}"
    shipped = SHIPPED.get(name)
    if shipped is not None:
        return shipped()
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"{flag}: choose {', '.join(SHIPPED)} or module:Class")
    try:
        policy_class = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # a user's module: importing it can raise anything
        raise ConfigError(
            f"{flag}: cannot import {module_name} ({type(error).__name__}: {error}); is its folder in PYTHONPATH?"
        ) from error
    if not isinstance(policy_class, type):
        raise ConfigError(f"{flag}: {module_name} has no class {class_name}")
    try:
        policy: SchedulingPolicy = policy_class()
        _try(policy)
    except Exception as error:  # a user's class, as above
        raise ConfigError(f"{flag}: {class_name} does not work ({type(error).__name__}: {error})") from error
    return policy


def _try(policy: SchedulingPolicy) -> None:
    """Ask everything once, so that a missing method or a misspelt field shows at the start."""
    first = RequestView(0, 0, num_prompt_tokens=100, num_output_tokens=0, max_tokens=16)
    second = RequestView(0, 1, num_prompt_tokens=10, num_output_tokens=0, max_tokens=16)
    checked_key(policy.key(first))
    policy.admits(second, EngineView(num_free_blocks=8, num_blocks=16, block_size=16, num_running=1, num_waiting=1))
    policy.preempts(second, first)


def _view(request: Request) -> RequestView:
    return RequestView(
        request.priority,
        request.arrival,
        request.num_prompt_tokens,
        len(request.output_token_ids),
        request.params.max_tokens,
        request.num_computed_tokens,
        request.num_preemptions,
        request.due,
    )
