"""Counts of the tokens that chose each expert, in a file that `--expert-placement` reads.

    {"num_experts": 8, "layers": [[12, 0, 3, ...], [], ...]}

A layer without experts has no counts. With `--expert-exchange dispatch` the engine's rank counts the rows that it
routes, which are its part of all.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from common.errors import ConfigError
from engine.expert_placement import Slots, balanced_placement
from engine.layers.moe import Moe
from engine.models.config import ModelConfig
from engine.models.model import Model

WRITE_SECONDS = 10.0


class ExpertLoadRecorder:
    """Counts what blocks of experts route, and writes it now and then."""

    def __init__(self, model: Model, path: Path) -> None:
        """Raise ConfigError for a model without experts, or a file that cannot be written."""
        moe = model.config.moe
        if moe is None:
            raise ConfigError("--expert-load-file: the model has no experts")
        self._num_experts, self._path = moe.num_experts, path
        counts = iter([_start_counting(block) for block in model.blocks if isinstance(block, Moe)])
        layers = range(model.config.num_layers)
        self._layers = [next(counts) if model.config.has_experts(layer) else None for layer in layers]
        self._due = time.monotonic() + WRITE_SECONDS
        try:
            self.write()
        except OSError as error:
            raise ConfigError(f"--expert-load-file {path}: {error.strerror}") from error

    def restart(self) -> None:
        """Forget what was counted."""
        for counts in self._layers:
            if counts is not None:
                counts.zero_()

    def after_step(self) -> None:
        if time.monotonic() >= self._due:
            self.write()
            self._due = time.monotonic() + WRITE_SECONDS

    def write(self) -> None:
        layers = [[] if counts is None else counts.tolist() for counts in self._layers]
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"num_experts": self._num_experts, "layers": layers}))
        unfinished.replace(self._path)


def _start_counting(block: Moe) -> torch.Tensor:
    block.loads = torch.zeros(block.rule.num_experts, dtype=torch.int64, device=block.router.device)
    return block.loads


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
