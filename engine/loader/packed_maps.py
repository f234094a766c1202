"""Linear maps of quantized rows: which product of this machine can take which rows, and what becomes of others.

    rows                            CPU           GPU
    4 bits in groups                Int4Linear    4-bit weights
    int8, one scale per row         Int8Linear    int8 weights, int8 or plain inputs
    e4m3                            int8          e4m3 weights and inputs, scales per row
    what no product takes           int8          bfloat16

Knows devices and products; nothing of files. Maps that the checkpoint left plain become int8 on a CPU, as in models
that are not quantized.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from engine.layers.decoder import DecoderModel
from engine.layers.linear import Int4Linear, Int8Linear, Linear, LinearMap
from engine.layers.reordered import Reordered
from engine.loader.packed_checkpoint import PackedWeights
from engine.loader.quantized_rows import QuantizedRows, join_rows
from engine.quantize import INT4_ROW_MULTIPLE, to_int8

logger = logging.getLogger(__name__)
CPU_GROUP_SIZES = (256, 128, 64, 32)  # of torch's 4-bit product


def can_keep_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has products for quantized weights with x of that type."""
    return dtype == torch.bfloat16 and (
        device.type != "cpu"
        or (hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and hasattr(torch.ops.aten, "_weight_int8pack_mm"))
    )


def packed_names(skeleton: DecoderModel, weights: PackedWeights) -> frozenset[str]:
    """Weights of maps that are quantized in all their parts. skeleton: the model, built without storage."""
    names: set[str] = set()

    def look(linear: LinearMap) -> LinearMap:
        if (
            isinstance(linear, Linear)
            and linear.names
            and linear.weight is not skeleton.embedding
            and all(weights.is_packed(name) for name in linear.names)
        ):
            names.update(linear.names)
        return linear

    skeleton.replace_linear_maps(look)
    return frozenset(names)


def place_packed_maps(model: DecoderModel, weights: PackedWeights, dtype: torch.dtype, device: torch.device) -> str:
    """Give every map that was built without storage its weights. Returns what the maps are now, for identity and log.

    Raises ConfigError for values that cannot be.
    """
    kinds: Counter[str] = Counter()
    is_tied = isinstance(model.lm_head, Linear) and model.lm_head.weight is model.embedding

    def convert(linear: LinearMap) -> LinearMap:
        assert isinstance(linear, Linear)
        if linear.weight.device.type != "meta":
            kinds["int8 of plain" if device.type == "cpu" else "plain"] += 1
            return to_int8(linear) if device.type == "cpu" else linear
        parts = [weights.rows(name) for name in linear.names]
        rows = join_rows(parts)
        if rows is None:
            plain = Linear(torch.cat([part.dequantize(dtype) for part in parts]), linear.bias, linear.names)
            kinds["plain, as its parts differ"] += 1
            return to_int8(plain) if device.type == "cpu" else plain
        made, kind = map_of_rows(rows, linear.bias, dtype, device)
        kinds[kind] += 1
        return made

    model.replace_linear_maps(convert)
    if is_tied and isinstance(model.lm_head, Int8Linear):  # keep one copy
        model.embedding = model.lm_head.weight
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def map_of_rows(
    rows: QuantizedRows, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[LinearMap, str]:
    """The map of `rows` on `device`, and what it is in a few words."""
    order = rows.order
    in_order = replace(rows, order=None)
    made = _cpu_map(in_order, bias, dtype) if device.type == "cpu" else None
    if made is None:
        plain = Linear(rows.dequantize(dtype), bias)
        if device.type != "cpu":
            return plain, "dequantized"
        return to_int8(plain), "int8 of e4m3" if rows.is_fp8 else "int8 of other groups"
    linear, kind = made
    return (linear, kind) if order is None else (Reordered(linear, order), kind + " reordered")


def _cpu_map(rows: QuantizedRows, bias: Tensor | None, dtype: torch.dtype) -> tuple[LinearMap, str] | None:
    if rows.is_int4:
        linear = _cpu_int4(rows, bias, dtype)
        return None if linear is None else (linear, "int4")
    if rows.codes.dtype == torch.int8 and rows.has_row_scales:
        scales = rows.scales[:, 0].to(dtype)
        dequantized = rows.codes.to(dtype).mul_(scales[:, None])
        return Int8Linear(rows.codes, scales, dequantized, bias), "int8"
    return None


def _cpu_int4(rows: QuantizedRows, bias: Tensor | None, dtype: torch.dtype) -> Int4Linear | None:
    """None for numbers of rows and group sizes that torch's product does not take."""
    num_rows, num_columns = rows.codes.shape
    sizes = [size for size in CPU_GROUP_SIZES if rows.group_size % size == 0 and num_columns % size == 0]
    if not sizes or num_rows % INT4_ROW_MULTIPLE or num_columns % rows.group_size:
        return None
    times = rows.group_size // sizes[0]
    scales = rows.scales.to(dtype).repeat_interleave(times, dim=1)
    offsets = torch.zeros_like(scales)
    if rows.offsets is not None:
        offsets = rows.offsets.to(dtype).repeat_interleave(times, dim=1)
    held = QuantizedRows(rows.codes, scales.float(), offsets.float(), sizes[0])
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.codes.int(), 2)
    scales_and_offsets = torch.stack([scales, offsets], dim=-1).transpose(0, 1).contiguous()
    return Int4Linear(packed, scales_and_offsets, sizes[0], held.dequantize(dtype), bias)
