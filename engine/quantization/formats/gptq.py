"""GPTQ: packed along the inputs, low bits first; zero points along the outputs.

qweight int32 (k bits/32, n), qzeros int32 (k/g, n bits/32), scales (k/g, n), g_idx (k,): the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.errors import ConfigError
from engine.quantization.formats.scheme import (
    FLOATS,
    INTS,
    CheckpointQuantization,
    K,
    N,
    NotSupportedError,
    Read,
    Stored,
    WeightScheme,
    bits_of,
    group_size_of,
    num_words,
    unpack_words,
)
from engine.quantization.quantized_rows import QuantizedRows

VERSIONS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class Gptq(WeightScheme):
    """GPTQ weights. subtracts_one: the first version of the format stores zero points minus one."""

    subtracts_one: bool = False

    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        groups, in_word, group = self.num_groups(k), 32 // self.bits, (K, self.block[1])
        return {
            "qweight": Stored(("I32",), ((num_words(k, self.bits), n),), ((K, in_word), (N, 1))),
            "qzeros": Stored(("I32",), ((groups, num_words(n, self.bits)),), (group, (N, in_word))),
            "scales": Stored(FLOATS, ((groups, n),), (group, (N, 1))),
            "g_idx": Stored(INTS, ((k,),), ((K, 1),), is_optional=True),
        }

    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        values = unpack_words(read("qweight").t(), self.bits)[:, :k]
        zero_words = read("qzeros")
        if self.subtracts_one:
            # Added to whole words, as the tool subtracts it: a zero point of 0 borrows from its neighbour.
            zero_words = zero_words + (0x11111111 if self.bits == 4 else 0x01010101)
        zeros = unpack_words(zero_words, self.bits)[:, :n].t()
        order = self.column_order(k, read("g_idx")) if "g_idx" in found else None
        return self.integer_rows(k, values, read("scales").t().float(), zeros.float(), order, stores_middles=True)


def parse(config: Mapping[str, Any]) -> CheckpointQuantization:
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if version not in VERSIONS or config.get("is_marlin_format"):
        raise NotSupportedError(f"GPTQ in the checkpoint format {'marlin' if version in VERSIONS else version!r}")
    if config.get("pack_dtype", "int32") != "int32":
        raise NotSupportedError(f"GPTQ packed in {config['pack_dtype']!r}")
    bits = bits_of(config.get("bits"), (4, 8), "GPTQ")
    base = Gptq(bits, (1, group_size_of(config)), False, subtracts_one=version == "gptq")
    schemes = [base]
    overrides = config.get("dynamic") or {}  # name pattern -> overrides; "-:..." is not quantized
    if not isinstance(overrides, Mapping):
        raise ConfigError("config.json: quantization_config.dynamic is not an object")
    for pattern, change in overrides.items():
        if not str(pattern).startswith("-:") and isinstance(change, Mapping):
            merged = {**config, **change}
            block = (1, group_size_of(merged))
            schemes.append(replace(base, bits=bits_of(merged.get("bits"), (4, 8), "GPTQ"), block=block))
    return CheckpointQuantization(f"gptq-{bits}bit", tuple(dict.fromkeys(schemes)))
