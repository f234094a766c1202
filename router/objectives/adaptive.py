"""Roles as preferences: places the requests of one model by latency objectives, and moves those that prefill workers
keep. The thin part; `placement.py` and `moves.py` decide. With a policy that does not predict, roles are rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from router.config import RouterConfig
from router.dispatch import MovableChoice, Roles
from router.objectives.moves import KeptRequest, choose_moves
from router.objectives.objectives import Objectives
from router.objectives.placement import place
from router.objectives.predictor import ObjectivePredictor
from router.objectives.settings import ObjectiveSettings
from router.routing.policy import Decision, choose
from router.routing.views import Candidate, RequestView, WorkerView
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import WorkerLink

MOVE_SECONDS = 0.05  # between looks at requests that prefill workers keep


class FixedRoles:
    """A policy that does not predict chooses; objectives say when tokens are due, and what its choice misses."""

    def __init__(self, objectives: Objectives, config: RouterConfig) -> None:
        self._objectives, self._config = objectives, config

    def choose(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        predictor = partial(ObjectivePredictor, self._objectives)
        config = self._config
        return choose(config.policy, request, prefill, decode, config.local_prefill_tokens, predictor)

    def due_seconds(self, chosen: Candidate, num_new_tokens: int, waited_seconds: float, has_started: bool) -> float:
        return self._objectives.due_seconds(chosen, num_new_tokens, waited_seconds, has_started)

    def watch_kept(self, choice: MovableChoice) -> None:
        """Nothing moves."""


class AdaptiveRoles(FixedRoles):
    """Placement and moves of one model's requests. Belongs to the running event loop."""

    def __init__(self, objectives: Objectives, config: RouterConfig, workers: ModelWorkers) -> None:
        super().__init__(objectives, config)
        self._workers = workers
        self._kept: dict[str, MovableChoice] = {}
        self._timer: asyncio.TimerHandle | None = None

    def choose(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        return place(request, prefill, decode, self._config.local_prefill_tokens, self._objectives)

    def watch_kept(self, choice: MovableChoice) -> None:
        """Look now and then whether the choice should move to a decode worker."""
        self._kept[choice.journal.choice_id] = choice
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOVE_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        now, choices = time.monotonic(), self._kept
        self._kept = {}
        by_link: dict[WorkerLink, list[KeptRequest]] = {}
        for choice in choices.values():
            leg, journal = choice.kept_leg, choice.journal
            if leg is not None:
                kept = KeptRequest(
                    journal.choice_id, journal.num_tokens, choice.tokens_left, now - leg.first_time,
                    len(journal.output_token_ids),
                )  # fmt: skip
                by_link.setdefault(leg.link, []).append(kept)
                self.watch_kept(choice)
        for link, requests in by_link.items():
            targets = [target.view() for target in self._workers.usable("decode")]
            moves = choose_moves(link.view(), requests, targets, self._objectives, must_leave=link.is_draining)
            for move in moves:
                choices[move.choice_id].move(move.chosen)


def open_objectives(config: RouterConfig, workers: ModelWorkers) -> Roles | None:
    """What places by the objectives; None without any."""
    objectives = config.of(ObjectiveSettings).objectives
    if not objectives:
        return None
    return AdaptiveRoles(objectives, config, workers) if config.policy == "cost" else FixedRoles(objectives, config)
