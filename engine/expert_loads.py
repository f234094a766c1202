"""Counts of the tokens that chose each expert: how even ranks are, and a file that `--expert-placement` reads.

    {"num_experts": 8, "layers": [[12, 0, 3, ...], [], ...]}

A layer without experts has no counts. With `--expert-exchange dispatch` the engine's rank counts the rows that it
routes, which are its part of all.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.engine import Runner
from engine.expert_placement import Slots, balanced_placement, plain_placement, rank_loads
from engine.layers.moe import Moe
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.plan import PendingStep, StepPlan

READ_SECONDS = 10.0
NUM_READS = 6  # of the window: a minute in which tokens were routed


class HostCopy:
    """A tensor as it will be when the device has done what it was given until now."""

    def __init__(self, source: Tensor) -> None:
        self.values = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self.values.copy_(source, non_blocking=True)
        self._event: Any = None
        if source.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_there(self) -> bool:
        """Whether its values have come. Waits for nothing."""
        return self._event is None or bool(self._event.query())


class ExpertLoadRecorder:
    """Lets blocks of experts count what they route, and reads it now and then."""

    def __init__(self, model: Model, path: Path) -> None:
        """Raise ConfigError for a model without experts, or a file that cannot be written."""
        if model.config.moe is None:
            raise ConfigError("--expert-load-file: the model has no experts")
        self._has_experts = [model.config.has_experts(layer) for layer in range(model.config.num_layers)]
        self._blocks = [block for block in model.blocks if isinstance(block, Moe)]
        shape = len(self._blocks), model.config.moe.num_experts
        self._counts = torch.zeros(shape, dtype=torch.int64, device=self._blocks[0].router.device)
        for block, counts in zip(self._blocks, self._counts, strict=True):
            block.loads = counts
        self._path = path
        self.restart()
        try:
            self.write()
        except OSError as error:
            raise ConfigError(f"--expert-load-file {path}: {error.strerror}") from error

    def restart(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()
        self._coming: HostCopy | None = None
        self._total = torch.zeros(self._counts.shape, dtype=torch.int64)
        self._window: deque[Tensor] = deque(maxlen=NUM_READS)
        self._due = time.monotonic() + READ_SECONDS
        self.rank_tokens = [0.0] * self.num_ranks
        """Choices of experts by tokens up to the last read, by the rank that has the expert."""
        self.balancedness = 0.0
        """Tokens of the mean rank over those of the one with the most, layers added up, in the window: 1 is best."""

    @property
    def num_ranks(self) -> int:
        """Ranks that experts are divided among."""
        return self._blocks[0].rule.expert_ranks

    def poll(self) -> None:
        """Read the counts if that is due, and take them up when they have come: the device is not waited for."""
        if self._coming is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + READ_SECONDS
            self._coming = HostCopy(self._counts)
        if self._coming is not None and self._coming.is_there():
            total, self._coming = self._coming.values, None
            self.take(total)
            self._write(total)

    def take(self, total: Tensor) -> None:
        """Take up what was counted since the last time. total: counts since the start, on the host."""
        new, self._total = total - self._total, total
        if not new.any():
            return
        self._window.append(new)
        for of_layer in self._rank_loads(new):
            self.rank_tokens = [sum(pair) for pair in zip(self.rank_tokens, of_layer, strict=True)]
        of_layers = self._rank_loads(torch.stack(list(self._window)).sum(dim=0))
        self.balancedness = sum(map(sum, of_layers)) / self.num_ranks / sum(map(max, of_layers))

    def write(self) -> None:
        """Write the file, with what was counted up to now."""
        self._write(self._counts)

    def _write(self, total: Tensor) -> None:
        counts = iter(total.tolist())
        layers = [next(counts) if has_experts else [] for has_experts in self._has_experts]
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"num_experts": self._counts.shape[1], "layers": layers}))
        unfinished.replace(self._path)

    def _rank_loads(self, counts: Tensor) -> list[list[float]]:
        """Tokens of each rank, by layer."""
        pairs = zip(self._blocks, counts.tolist(), strict=True)
        return [
            rank_loads(block.rule.slots or plain_placement(len(loads)), loads, self.num_ranks)
            for block, loads in pairs
        ]


class CountedRunner:
    """A `Runner` whose experts are counted, in the steps of another one."""

    def __init__(self, runner: Runner, loads: ExpertLoadRecorder) -> None:
        self._runner, self._loads = runner, loads
        weakref.finalize(self, loads.write)

    @property
    def max_steps_in_flight(self) -> int:
        """See Runner."""
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        """See Runner."""
        pending = self._runner.launch(plan)
        self._loads.poll()
        return pending

    def needs_known_tokens(self, plan: StepPlan) -> bool:
        """See Runner."""
        return self._runner.needs_known_tokens(plan)

    def check(self) -> None:
        """See Runner. Without work this is what reads the last steps' counts."""
        self._runner.check()
        self._loads.poll()


def placements_of(path: Path, config: ModelConfig, num_ranks: int, num_redundant: int) -> tuple[Slots, ...]:
    """A balanced placement for each layer, by the loads in the file; () of layers without experts.

    Raises ConfigError.
    """
    try:
        content = json.loads(path.read_text())
        num_experts, layers = int(content["num_experts"]), [[int(n) for n in layer] for layer in content["layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--expert-placement {path}: no loads of experts in it ({error})") from error
    if config.moe is None:
        raise ConfigError("--expert-placement: the model has no experts")
    wanted = [config.moe.num_experts if config.has_experts(layer) else 0 for layer in range(config.num_layers)]
    if num_experts != config.moe.num_experts or [len(layer) for layer in layers] != wanted:
        raise ConfigError(f"--expert-placement {path}: its loads are of another model")
    return tuple(balanced_placement(layer, num_ranks, num_redundant) if layer else () for layer in layers)
