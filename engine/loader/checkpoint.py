"""What a model needs of a checkpoint: compared with what it has before any weight is read, then taken and counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from common.errors import ConfigError
from engine.layers.weights import Partition, WeightSource
from engine.wings import OnProgress, no_progress

# Stored by some tools, recomputed here; scales of an 8-bit KV cache are not used.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".k_scale", ".v_scale", ".q_scale")
MAX_NAMES = 5
INTERVAL_SECONDS = 0.1  # between reports of progress

Shape = tuple[int, ...]
Check = Callable[..., None]
"""`check_weights` of what is found."""


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
    """What a model takes while it is built: weights from any source, in the same order in all its processes.

    Tells `on_progress` which part of the model's numbers has been read, at most ten times a second and at the end.
    """

    def __init__(
        self, source: WeightSource, needed: Mapping[str, Shape], on_progress: OnProgress = no_progress
    ) -> None:
        """needed: shapes of all that this process reads."""
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
        """A weight has been read, perhaps once more: an expert may have several slots."""
        self._num_read += self._unread.pop(name, 0)
        now = time.monotonic()
        if now - self._told >= INTERVAL_SECONDS or self._num_read == self._total:
            self._told = now
            self._on_progress("loading weights", self._num_read / self._total)
