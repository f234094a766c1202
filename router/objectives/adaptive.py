"""Roles as preferences: places a model's requests by latency objectives, and moves those kept on prefill workers.

This is the thin part; `placement.py` and `moves.py` decide. With a policy that does not predict, roles are fixed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from protos import types_pb2 as pb
from router.choice import Choice, State
from router.config import RouterConfig
from router.costs.meter import meter_of
from router.costs.roles import PolicyRoles
from router.journal import Placement
from router.objectives.moves import KeptRequest, choose_moves, tokens_left
from router.objectives.objectives import Objectives
from router.objectives.placement import place
from router.objectives.predictor import ObjectivePredictor
from router.objectives.settings import ObjectiveSettings
from router.routing.policy import Decision, choose
from router.routing.rates import AnswerLength
from router.routing.settings import RoutingSettings
from router.routing.views import Candidate, RequestView, WorkerView
from router.workers.failures import WorkerLostError
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import Leg, WorkerLink

MOVE_SECONDS = 0.05  # interval of checks on requests that prefill workers keep


class FixedRoles(PolicyRoles):
    """The policy alone chooses. Objectives, if any, say when tokens are due and by how much a choice misses them."""

    def __init__(self, objectives: Objectives, config: RouterConfig, workers: ModelWorkers) -> None:
        super().__init__(config, workers)
        self._objectives = objectives

    def decide(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        predictor = partial(ObjectivePredictor, self._objectives)
        return choose(self._policy, request, prefill, decode, self._config.local_prefill_tokens, predictor)

    def due_seconds(self, chosen: Placement, num_new_tokens: int, waited_seconds: float, has_started: bool) -> float:
        assert isinstance(chosen, Candidate)  # chosen by `decide`
        return self._objectives.due_seconds(chosen, num_new_tokens, waited_seconds, has_started)


class AdaptiveRoles(FixedRoles):
    """Places and moves one model's requests. Belongs to the running event loop."""

    def __init__(self, objectives: Objectives, config: RouterConfig, workers: ModelWorkers) -> None:
        super().__init__(objectives, config, workers)
        self._kept: dict[str, Choice] = {}
        self._timer: asyncio.TimerHandle | None = None

    def decide(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        return place(request, prefill, decode, self._config.local_prefill_tokens, self._objectives)

    def watch_kept(self, leg: Leg) -> None:
        """Check regularly whether the leg's choice should move to a decode worker."""
        choice = leg.listener
        assert isinstance(choice, Choice)
        self._kept[choice.journal.choice_id] = choice
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOVE_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        now, choices = time.monotonic(), self._kept
        self._kept = {}
        by_link: dict[WorkerLink, list[KeptRequest]] = {}
        for choice in choices.values():
            if (leg := kept_leg(choice)) is not None:
                by_link.setdefault(leg.link, []).append(_request(choice, self.answers, now - leg.first_time))
                self.watch_kept(leg)
        for link, requests in by_link.items():
            targets = [meter_of(target).view() for target in self._workers.usable("decode")]
            source = meter_of(link).view()
            moves = choose_moves(source, requests, targets, self._objectives, must_leave=link.is_draining)
            for each in moves:
                move(choices[each.choice_id], each.chosen)


def kept_leg(choice: Choice) -> Leg | None:
    """Return the open leg if a prefill worker decodes the choice and has not been asked to hand it over."""
    leg = choice.leg
    if leg is None or leg.link.role != "prefill" or choice.state is not State.DECODE:
        return None
    return None if leg.times is None or leg.next_link is not None else leg


def move(choice: Choice, chosen: Candidate) -> None:
    """Ask its worker to end the leg with its next token and a handle, so that the choice goes on elsewhere."""
    if (leg := kept_leg(choice)) is None or leg.link.stream is None:
        return
    try:
        target = choice.dispatcher.link(chosen.decode)
    except WorkerLostError:
        return
    choice.placement = chosen
    roles = choice.dispatcher.roles
    assert isinstance(roles, PolicyRoles)  # set by this wing
    roles.on_decision(choice.journal, Decision(chosen, (chosen,), "move"))
    leg.next_link = target
    target.num_expected += 1
    meter_of(leg.link).handed_over(leg)
    leg.link.stream.send(pb.Command(hand_over=pb.HandOver(request_id=leg.leg_id)))


def _request(choice: Choice, answers: AnswerLength, seconds_here: float) -> KeptRequest:
    journal, num_answered = choice.journal, len(choice.journal.output_token_ids)
    left = tokens_left(answers, journal.sampling.max_tokens, num_answered)
    return KeptRequest(journal.choice_id, journal.num_tokens, left, seconds_here, num_answered)


def open_objectives(config: RouterConfig, workers: ModelWorkers) -> FixedRoles:
    """Return the roles that place by the objectives; without objectives, by the policy alone."""
    objectives = config.of(ObjectiveSettings).objectives
    is_adaptive = bool(objectives) and config.of(RoutingSettings).policy == "cost"
    return AdaptiveRoles(objectives, config, workers) if is_adaptive else FixedRoles(objectives, config, workers)
