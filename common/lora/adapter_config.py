"""adapter_config.json of a PEFT folder: an adapter's ranks and scales. Refuses everything but plain LoRA.

y = W x + scale * B A x      scale = alpha / rank, rank-stabilized: alpha / sqrt(rank)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
# Fields that change what an adapter computes, the values with which they do not, and the error for others.
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (None, False), "DoRA adapters are not supported: merge this one into its model's weights"),
    ("bias", (None, "none"), "adapters with trained biases are not supported"),
    ("lora_bias", (None, False), "adapters with a bias of their own are not supported"),
    ("modules_to_save", (None, []), "adapters that bring whole layers (modules_to_save) are not supported"),
    ("fan_in_fan_out", (None, False), "adapters of transposed weights (fan_in_fan_out) are not supported"),
    ("layer_replication", (None, []), "adapters that repeat layers (layer_replication) are not supported"),
    ("trainable_token_indices", (None, [], {}), "adapters that train single tokens are not supported"),
    ("target_parameters", (None, []), "adapters of parameters (target_parameters) are not supported"),
    ("alora_invocation_tokens", (None, []), "activated LoRA is not supported"),
    ("use_qalora", (None, False), "QA-LoRA adapters are not supported"),
)
# Values of init_lora_weights that make the adapter belong to other base weights than those in the model's files.
OTHER_BASES = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """rank, alpha: of modules without a pattern. A pattern matches the end of a module's name."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @property
    def max_rank(self) -> int:
        return max(self.rank, *self.ranks.values()) if self.ranks else self.rank

    def rank_of(self, module: str) -> int:
        rank: int = _by_pattern(self.ranks, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), float(_by_pattern(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read an adapter's config. Raises ConfigError if it is missing, damaged, or not plain LoRA."""
    raw = _read_json(folder / CONFIG_NAME)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{CONFIG_NAME}: peft_type {kind!r} is not supported: LORA is")
    for name, plain, reason in REFUSED:
        if raw.get(name) not in plain:
            raise ConfigError(reason)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(OTHER_BASES):
        raise ConfigError(f"init_lora_weights {start!r}: the adapter belongs to other weights than the model's files")
    ranks, alphas = _pattern(raw, "rank_pattern"), _pattern(raw, "alpha_pattern")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    for name, value in (("r", rank), *(("rank_pattern", each) for each in ranks.values())):
        if type(value) is not int or not 1 <= value <= 4096:
            raise ConfigError(f"{CONFIG_NAME}: {name} {value!r} is no rank from 1 to 4096")
    for name, value in (("lora_alpha", alpha), *(("alpha_pattern", each) for each in alphas.values())):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{CONFIG_NAME}: {name} {value!r} is no number")
    return AdapterConfig(int(rank or 0), float(alpha or 0), bool(raw.get("use_rslora")), ranks, alphas)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path.name} is too large")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path.parent} has no {path.name} that can be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is damaged") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} is damaged")
    return raw


def _pattern(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{CONFIG_NAME}: {name} is no object")
    for key in found:
        try:
            re.compile(key)
        except re.error as error:
            raise ConfigError(f"{CONFIG_NAME}: {name} has the damaged pattern {key[:100]!r}") from error
    return found


def _by_pattern(values: Mapping[str, Any], module: str, default: Any) -> Any:
    """Look up a module as PEFT does: the first pattern that is its name, or the name's end after a dot."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)
