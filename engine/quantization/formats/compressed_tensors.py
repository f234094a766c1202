"""compressed-tensors: one byte per weight as in `fp8.py`, or integers packed along the inputs, low bits first.

weight_packed int32 (n, k bits/32), weight_scale (n, k/g), weight_zero_point int32 (n bits/32, k/g), weight_shape,
weight_g_idx (k,). Zero points are packed along the outputs; both are signed numbers plus half the range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from common.errors import ConfigError
from engine.quantization.formats.fp8 import Fp8, Int8
from engine.quantization.formats.modelopt import GROUP_SIZE, Nvfp4
from engine.quantization.formats.scheme import (
    FLOATS,
    INTS,
    ROW,
    TENSOR,
    CheckpointQuantization,
    K,
    N,
    NotSupportedError,
    Read,
    Stored,
    WeightScheme,
    bits_of,
    block_of,
    group_size_of,
    num_words,
    unpack_words,
)
from engine.quantization.quantized_rows import QuantizedRows


@dataclass(frozen=True, slots=True)
class PackQuantized(WeightScheme):
    """Packed integers of 4 or 8 bits."""

    def tensors(self, n: int, k: int, found: Mapping[str, object]) -> dict[str, Stored]:
        in_word, group = 32 // self.bits, (K, self.block[1])
        shapes, blocks = self.scale_shapes(n, k), ((N, self.block[0]), group)
        zeros = {}
        if not self.is_symmetric:
            stored = Stored(("I8",), shapes, blocks)
            if self.block != TENSOR:
                words = num_words(n, self.bits)
                stored = Stored(("I32",), ((words, self.num_groups(k)),), ((N, in_word), group))
            zeros = {"weight_zero_point": stored}
        return {
            "weight_packed": Stored(("I32",), ((n, num_words(k, self.bits)),), ((N, 1), (K, in_word))),
            "weight_scale": Stored(FLOATS, shapes, blocks),
            "weight_shape": Stored(INTS, ((2,),)),
            "weight_g_idx": Stored(INTS, ((k,),), ((K, 1),), is_optional=True),
            **zeros,
        }

    def rows(self, n: int, k: int, read: Read, found: Mapping[str, object]) -> QuantizedRows:
        values = unpack_words(read("weight_packed"), self.bits)[:, :k]
        scales = self.per_row(n, k, read("weight_scale").float())
        middle = 1 << (self.bits - 1)
        if self.is_symmetric:
            zeros = torch.full_like(scales, middle)
        elif self.block == TENSOR:
            zeros = self.per_row(n, k, read("weight_zero_point").float()) + middle
        else:
            zeros = unpack_words(read("weight_zero_point").t(), self.bits)[:, :n].t().float()
        order = self.column_order(k, read("weight_g_idx")) if "weight_g_idx" in found else None
        return self.integer_rows(k, values, scales, zeros, order, stores_middles=self.is_symmetric)


@dataclass(frozen=True, slots=True)
class Nvfp4Packed(Nvfp4):
    """ModelOpt's NVFP4 under other names; scales are divided by the second scale."""

    packed: ClassVar[str] = "weight_packed"
    second: ClassVar[str] = "weight_global_scale"
    divides: ClassVar[bool] = True


STORED: dict[tuple[str, str], tuple[type[WeightScheme], tuple[int, ...]]] = {
    ("pack-quantized", "int"): (PackQuantized, (4, 8)),
    ("int-quantized", "int"): (Int8, (8,)),
    ("naive-quantized", "int"): (Int8, (8,)),
    ("float-quantized", "float"): (Fp8, (8,)),
    ("naive-quantized", "float"): (Fp8, (8,)),
    ("nvfp4-pack-quantized", "float"): (Nvfp4Packed, (4,)),
}


def parse(config: Mapping[str, Any]) -> CheckpointQuantization:
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise NotSupportedError(f"compressed-tensors with {key}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ConfigError("config.json: quantization_config.config_groups is not an object of objects")
    schemes, labels = [], []
    for group in groups.values():
        weights = group.get("weights")
        if weights is None:  # a group that only quantizes inputs
            continue
        if not isinstance(weights, Mapping):
            raise ConfigError("config.json: the weights of a config group are not an object")
        scheme = _scheme(weights, str(group.get("format") or config.get("format")))
        scheme = replace(scheme, quantizes_inputs=_has_eight_bits(group.get("input_activations")))
        input_bits = 8 if scheme.quantizes_inputs else 16
        schemes.append(scheme)
        label = f"{'fp' if isinstance(scheme, Fp8) else ''}w{scheme.bits}a{input_bits}"
        labels.append("nvfp4" if isinstance(scheme, Nvfp4) else label)
    if not schemes:
        raise NotSupportedError("compressed-tensors without quantized weights")
    label = "compressed-tensors-" + "+".join(sorted(set(labels)))
    return CheckpointQuantization(label.replace("fpw8a8", "fp8").replace("fpw8a16", "fp8a16"), tuple(schemes))


def _scheme(weights: Mapping[str, Any], stored_as: str) -> WeightScheme:
    kind, bits = str(weights.get("type") or "int").lower(), weights.get("num_bits", 8)
    scheme, widths = STORED.get((stored_as, kind), (PackQuantized, ()))
    what = f"compressed-tensors of the format {stored_as!r}"
    width = bits_of(bits, widths, f"{what} of {kind} numbers")
    stated = weights.get("group_size")
    group_size = group_size_of({"group_size": -1 if stated is None else stated})
    by_size = "tensor" if stated is None else "group" if group_size else "channel"
    strategy = str(weights.get("strategy") or by_size)
    if strategy == "group" and not group_size:
        raise ConfigError("config.json: a config group with scales per group has no group_size")
    blocks = {"tensor": TENSOR, "channel": ROW, "group": (1, group_size)}
    if scheme is Nvfp4Packed:
        if group_size != GROUP_SIZE:
            raise NotSupportedError(f"{what} in groups of {stated!r}")
        blocks = {"tensor_group": (1, group_size)}
    if strategy == "block":
        block = block_of(weights.get("block_structure"))
    elif strategy in blocks:
        block = blocks[strategy]
    else:
        raise NotSupportedError(f"{what} with scales per {strategy}")
    return scheme(width, block, bool(weights.get("symmetric", True)))


def _has_eight_bits(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and inputs.get("num_bits", 8) == 8
