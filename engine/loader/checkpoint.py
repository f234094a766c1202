"""Compare what a model needs with what a checkpoint has, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from common.errors import ConfigError

# Stored by some tools, recomputed here; scales of an 8-bit KV cache are not used.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".k_scale", ".v_scale", ".q_scale")
MAX_NAMES = 5
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
