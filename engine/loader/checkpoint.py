"""Compares the weights that a model needs with a checkpoint before any is read; counts them while they are read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import Partition, WeightSource
from engine.wings import OnProgress, no_progress

# Some tools store these. They are recomputed here, except scales of an 8-bit KV cache, which are not used.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".k_scale", ".v_scale", ".q_scale")
MAX_NAMES = 5
INTERVAL_SECONDS = 0.1  # between reports of progress

Shape = tuple[int, ...]
Check = Callable[..., None]
"""`check_weights` with `found` given."""


def check_weights(
    needed: Mapping[str, Shape],
    found: Mapping[str, Shape],
    tied: bool,
    unused: tuple[str, ...],
    quantized: Sequence[str] = (),
) -> None:
    """Raise ConfigError that names missing, unexpected and wrongly shaped weights.

    quantized: one message for each wrong quantized weight. unused: see `ModelConfig.unused_weights`.
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
    """The source that a model is built from: weights from any source, in the same order in all its processes.

    Calls `on_progress` with the share of the model's numbers that has been read, at most ten times a second and at
    the end.
    """

    def __init__(
        self, source: WeightSource, needed: Mapping[str, Shape], on_progress: OnProgress = no_progress
    ) -> None:
        """needed: shapes of all weights that this process reads."""
        self._source = source
        self._unread = {name: math.prod(shape) for name, shape in needed.items()}
        self._total, self._num_read = sum(self._unread.values()), 0
        self._on_progress, self._told = on_progress, 0.0

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        """See WeightSource."""
        weight = self._source.take(name, shape, partition)
        self.count(name)
        return weight

    def count(self, name: str) -> None:
        """Count a weight that has been read, perhaps not for the first time: an expert may have several slots."""
        self._num_read += self._unread.pop(name, 0)
        now = time.monotonic()
        if now - self._told >= INTERVAL_SECONDS or self._num_read == self._total:
            self._told = now
            self._on_progress("loading weights", self._num_read / self._total)
