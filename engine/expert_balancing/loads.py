"""Counts the tokens that chose each expert: for metrics of balance, and a file for `--expert-placement`.

    {"num_experts": 8, "layers": [[12, 0, 3, ...], [], ...]}

A layer without experts has no counts. With `--expert-exchange dispatch` rank 0 counts only the rows that it routes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.expert_balancing.placement import Slots, balanced_placement, first_placement, plain_placement, rank_loads
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.moe.layers import has_experts
from engine.moe.moe import Moe

logger = logging.getLogger(__name__)
READ_SECONDS = 10.0
NUM_READS = 6  # reads in the window: a minute in which tokens were routed


class HostCopy:
    """A copy of a tensor, as it is once the device has done all work queued so far."""

    def __init__(self, source: Tensor) -> None:
        self.values = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self.values.copy_(source, non_blocking=True)
        self._event: Any = None
        if source.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_there(self) -> bool:
        """Whether the values have arrived. Does not wait."""
        return self._event is None or bool(self._event.query())


class ExpertLoadRecorder:
    """Lets blocks of experts count what they route, and reads the counts from time to time."""

    def __init__(self, model: Model, path: Path | None) -> None:
        """path: of the file, if any. Raises ConfigError if it cannot be written, or the model has no experts."""
        if model.config.moe is None:
            raise ConfigError("--expert-load-file: the model has no experts")
        self._has_experts = [has_experts(model.config, layer) for layer in range(model.config.num_layers)]
        self.blocks = [block for block in model.blocks if isinstance(block, Moe)]
        shape = len(self.blocks), model.config.moe.num_experts
        self._counts = torch.zeros(shape, dtype=torch.int64, device=self.blocks[0].router.device)
        for block, counts in zip(self.blocks, self._counts, strict=True):
            block.loads = counts
        self._path = path
        self.restart()
        try:
            self._write(self._counts)
        except OSError as error:
            raise ConfigError(f"--expert-load-file {path}: {error.strerror}") from error

    def restart(self) -> None:
        """Reset all counts."""
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
        """The number of ranks that divide the experts."""
        return self.blocks[0].rule.expert_ranks

    def poll(self) -> None:
        """Start to read the counts if that is due, and take them once they have arrived, without waiting."""
        if self._coming is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + READ_SECONDS
            self._coming = self.start_copy()
        if self._coming is not None and self._coming.is_there():
            total, self._coming = self._coming.values, None
            self.take(total)
            self.write(total)

    def take(self, total: Tensor) -> None:
        """Add the counts since the last call. total: counts since the start, on the host."""
        new, self._total = total - self._total, total
        if not new.any():
            return
        self._window.append(new)
        for of_layer in self._rank_loads(new):
            self.rank_tokens = [sum(pair) for pair in zip(self.rank_tokens, of_layer, strict=True)]
        of_layers = self._rank_loads(torch.stack(list(self._window)).sum(dim=0))
        self.balancedness = sum(map(sum, of_layers)) / self.num_ranks / sum(map(max, of_layers))

    def write(self, total: Tensor | None = None) -> None:
        """Write the file, if any. total: None: the counts up to now."""
        try:
            self._write(self._counts if total is None else total)
        except OSError as error:  # steps continue without it
            logger.warning("loads of experts are not written to %s: %s", self._path, error.strerror)

    def start_copy(self) -> HostCopy:
        """Copy the counts after all steps launched so far, a row for each of `blocks`."""
        return HostCopy(self._counts)

    def _write(self, total: Tensor) -> None:
        if self._path is None:
            return
        counts = iter(total.tolist())
        layers = [next(counts) if has_experts else [] for has_experts in self._has_experts]
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"num_experts": self._counts.shape[1], "layers": layers}))
        unfinished.replace(self._path)

    def _rank_loads(self, counts: Tensor) -> list[list[float]]:
        """Return each rank's tokens, by layer."""
        pairs = zip(self.blocks, counts.tolist(), strict=True)
        return [rank_loads(placement_of(block), loads, self.num_ranks) for block, loads in pairs]


def placement_of(block: Moe) -> Slots:
    """Return a block's current placement."""
    return plain_placement(block.rule.num_experts) if block.slots is None else block.slots.placement


def first_placements(config: ModelConfig, num_ranks: int, num_redundant: int) -> tuple[Slots, ...]:
    """Return a placement per layer before loads are known; () for layers without experts. Raises ConfigError."""
    if config.moe is None:
        raise ConfigError("--expert-rebalance-interval: the model has no experts")
    slots = first_placement(config.moe.num_experts, num_ranks, num_redundant)
    return tuple(slots if has_experts(config, layer) else () for layer in range(config.num_layers))


def placements_of(path: Path, config: ModelConfig, num_ranks: int, num_redundant: int) -> tuple[Slots, ...]:
    """Return a balanced placement per layer for the loads in the file; () for layers without experts.

    Raises ConfigError.
    """
    try:
        content = json.loads(path.read_text())
        num_experts, layers = int(content["num_experts"]), [[int(n) for n in layer] for layer in content["layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--expert-placement {path}: no loads of experts in it ({error})") from error
    if config.moe is None:
        raise ConfigError("--expert-placement: the model has no experts")
    wanted = [config.moe.num_experts if has_experts(config, layer) else 0 for layer in range(config.num_layers)]
    if num_experts != config.moe.num_experts or [len(layer) for layer in layers] != wanted:
        raise ConfigError(f"--expert-placement {path}: its loads are of another model")
    return tuple(balanced_placement(layer, num_ranks, num_redundant) if layer else () for layer in layers)
