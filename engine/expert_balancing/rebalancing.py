"""Places experts by their loads while serving: on rank 0, around the runner of all ranks.

Every `interval` steps the loads since the last look determine each layer's best placement. If it is better by
MIN_GAIN, a step's plan carries it, one layer per step, and ranks execute it (`engine/expert_balancing/moves.py`).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Runner
from engine.expert_balancing.loads import ExpertLoadRecorder, HostCopy, placement_of
from engine.expert_balancing.placement import better_placement, imbalance
from engine.expert_balancing.settings import ExpertBalancingSettings
from engine.loader.load import LoadedModel
from engine.plan import PendingStep, PlacedExperts, StepPlan
from engine.wings import Figures

logger = logging.getLogger(__name__)
MIN_GAIN = 1.1  # ratio of the busiest rank's tokens before and after
MIN_CHOICES_A_SLOT = 256  # in every layer; with 16, chance made ranks of four slots differ by a tenth


class Rebalancer:
    """Decides which layer gets which placement."""

    def __init__(self, loads: ExpertLoadRecorder, interval: int) -> None:
        """interval: steps between looks."""
        self._loads, self._interval = loads, interval
        self._num_steps = 0  # since the last look
        self._seen: torch.Tensor | int = 0  # counts at the last look
        self._coming: HostCopy | None = None
        self._changes: deque[PlacedExperts] = deque()
        self.num_changes = 0
        """Layers that were placed anew."""

    def next_change(self) -> PlacedExperts | None:
        """Return the change for the next step, if any. Called once per step."""
        self._num_steps += 1
        if self._num_steps >= self._interval and not self._changes:
            self._num_steps = 0
            self._coming = self._loads.start_copy()
        if self._coming is not None and self._coming.is_there():
            total, self._coming = self._coming.values, None
            self._look(total)
        if not self._changes:
            return None
        self.num_changes += 1
        return self._changes.popleft()

    def _look(self, total: torch.Tensor) -> None:
        """Decide for all layers. total: tokens of each layer's experts since the start."""
        new = total - self._seen
        blocks, num_ranks = self._loads.blocks, self._loads.num_ranks
        if int(new.sum(dim=1).min()) < MIN_CHOICES_A_SLOT * blocks[0].rule.num_slots:
            return
        self._seen = total
        for index, (block, loads) in enumerate(zip(blocks, new.tolist(), strict=True)):
            before = placement_of(block)
            slots = better_placement(before, loads, num_ranks, MIN_GAIN)
            if slots is not None:
                self._changes.append(PlacedExperts(index, slots))
                logger.info(
                    "experts of layer %d of %d: the busiest rank has %.2f times the mean, and will have %.2f",
                    index, len(blocks), imbalance(before, loads, num_ranks), imbalance(slots, loads, num_ranks),
                )  # fmt: skip


class Balancing:
    """Counts of experts, and the rebalancer if there is one."""

    def __init__(self, loads: ExpertLoadRecorder, rebalancer: Rebalancer | None = None) -> None:
        self.loads, self.rebalancer = loads, rebalancer

    def counted(self, runner: Runner) -> CountedRunner:
        """Return the runner with experts counted from now on."""
        self.loads.restart()
        return CountedRunner(runner, self.loads, self.rebalancer)

    def figures(self) -> Figures:
        """See Counting."""
        return {
            "mini_infer_expert_balancedness": [self.loads.balancedness],
            "mini_infer_expert_tokens": self.loads.rank_tokens,
            "mini_infer_expert_placements": [0 if self.rebalancer is None else self.rebalancer.num_changes],
        }


def open_balancing(loaded: LoadedModel, config: EngineConfig) -> Balancing | None:
    """Return None if no setting needs counts. Raises ConfigError for a model without experts."""
    settings = config.of(ExpertBalancingSettings)
    path, interval = settings.expert_load_file, settings.expert_rebalance_interval
    if not (path or interval):
        return None
    loads = ExpertLoadRecorder(loaded.model, Path(path) if path else None)
    return Balancing(loads, Rebalancer(loads, interval) if interval else None)


class CountedRunner:
    """Wraps a `Runner`: counts its experts, and changes their placement if there is a rebalancer."""

    def __init__(self, runner: Runner, loads: ExpertLoadRecorder, rebalancer: Rebalancer | None = None) -> None:
        self._runner, self._loads, self._rebalancer = runner, loads, rebalancer
        weakref.finalize(self, loads.write)

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        if self._rebalancer is not None:
            plan.placed = self._rebalancer.next_change()
        pending = self._runner.launch(plan)
        self._loads.poll()
        return pending

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        return self._runner.needs_known_tokens(plan)

    def check(self) -> None:
        """See Runner. Reads the last steps' counts when there is no work."""
        self._runner.check()
        self._loads.poll()
