"""Roles as preferences: places the requests of one model by latency objectives, and moves those that prefill workers
keep. The thin part; `placement.py` and `moves.py` decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from router.config import RouterConfig
from router.dispatch import MovableChoice
from router.objectives.moves import KeptRequest, choose_moves
from router.objectives.placement import place
from router.objectives.settings import ObjectiveSettings
from router.routing.objectives import Objectives
from router.routing.policy import Decision
from router.routing.views import RequestView, WorkerView
from router.workers.model_workers import ModelWorkers
from router.workers.worker_link import WorkerLink

MOVE_SECONDS = 0.05  # between looks at requests that prefill workers keep


class AdaptiveRoles:
    """Placement and moves of one model's requests. Belongs to the running event loop."""

    def __init__(self, objectives: Objectives, local_prefill_tokens: int, workers: ModelWorkers) -> None:
        self._objectives, self._local_prefill_tokens = objectives, local_prefill_tokens
        self._workers = workers
        self._kept: dict[str, MovableChoice] = {}
        self._timer: asyncio.TimerHandle | None = None

    def choose(self, request: RequestView, prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> Decision:
        return place(request, prefill, decode, self._local_prefill_tokens, self._objectives)

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


def open_objectives(config: RouterConfig, workers: ModelWorkers) -> tuple[Objectives, AdaptiveRoles | None]:
    """The objectives, and what places by them; None without any, and for policies that do not predict."""
    objectives = config.of(ObjectiveSettings).objectives
    is_used = objectives and config.policy == "cost"
    return objectives, AdaptiveRoles(objectives, config.local_prefill_tokens, workers) if is_used else None
