"""What a model needs of a checkpoint: compared with what it has before any weight is read, then taken and counted."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import Part, Partition, PartSource, WeightSource
from engine.wings import OnProgress, no_progress

# Stored by some tools, recomputed here; scales of an 8-bit KV cache are not used.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".k_scale", ".v_scale", ".q_scale")
MAX_NAMES = 5
INTERVAL_SECONDS = 0.1  # between reports of progress
_LAYER = re.compile(r"\.layers\.(\d+)\.")

Shape = tuple[int, ...]
Check = Callable[..., None]
"""`check_weights` of what is found."""


def layer_of(name: str) -> int | None:
    """The layer that a weight belongs to; None: the embedding, the final norm or the head."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def check_weights(
    needed: Mapping[str, Shape],
    found: Mapping[str, Shape],
    tied: bool,
    unused: tuple[str, ...],
    quantized: Sequence[str] = (),
) -> None:
    """Raise ConfigError that names missing, unexpected and wrongly shaped weights.

    quantized: what is wrong with quantized ones, a line each. unused: see ModelConfig.
    """
    ignored = {"lm_head.weight"} if tied else set()
    missing = [name for name in needed if name not in found]
    unexpected = [
        name
        for name in found
        if not (name in needed or name in ignored or name.startswith(unused) or name.endswith(IGNORED_SUFFIXES))
    ]
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in needed.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    problems = [
        f"{title}: {_listed(names)}"
        for title, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", wrong),
            ("quantized weights", quantized),
        )
        if names
    ]
    if problems:
        raise ConfigError("the weights do not fit the model's config; " + "; ".join(problems))


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest


class ModelWeights:
    """What a model takes while it is built: weights from any source, counted, in the same order in all its processes.

    parts: of weights that are divided among ranks, once they were asked for.
    """

    def __init__(
        self, source: WeightSource, needed: Mapping[str, Shape], *, kept: Collection[str] = (),
        on_progress: OnProgress = no_progress, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """needed: shapes of all that this process reads. kept: come without storage and are read later, and `count`ed
        then. on_progress: is told which part of the model's numbers has been read, at most ten times a second and at
        the end.
        """
        self.parts: dict[str, Part] = {}
        self._source, self._kept = source, kept
        self._dtype, self._device = dtype, device
        self._unread = {name: math.prod(shape) for name, shape in needed.items()}
        self._needed = needed.keys()
        self._total, self._num_read = sum(self._unread.values()), 0
        self._on_progress, self._told = on_progress, 0.0

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource. What is not needed comes without storage, or that of no layer without rows."""
        is_needed, draws_in_turn = name in self._needed, not isinstance(self._source, PartSource)
        if draws_in_turn or (is_needed and name not in self._kept):
            weight = self._read(name, shape, partition)
            if is_needed:
                self.count(name)
                return weight
        if is_needed or layer_of(name) is not None:
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return torch.empty((0, *shape[1:]), dtype=self._dtype, device=self._device)

    def count(self, name: str) -> None:
        """A weight has been read, perhaps once more: an expert may have several slots."""
        self._num_read += self._unread.pop(name, 0)
        now = time.monotonic()
        if now - self._told >= INTERVAL_SECONDS or self._num_read == self._total:
            self._told = now
            self._on_progress("loading weights", self._num_read / self._total)

    def _read(self, name: str, shape: Shape, partition: Partition) -> Tensor:
        return self._source.take(name, shape, partition)
