"""Linear layers of quantized rows: put into a model that was built without them. What is made of what:

    rows                       CPU          GPU (`engine/quantization/gpu_packed_linears.py`)
    4 bits in groups           int4_linear  w4a16_layer
    int8, a scale per row      int8_linear  W8A8, or W8A16 where inputs were not meant to be quantized
    e4m3, inputs of 8 bits     int8         FP8; scales of blocks become scales of rows
    others                     int8         int8, inputs as they are

Experts on a GPU keep 4 bits and 8 bits as they are, scales of groups and blocks too (stored_layer), and their
inputs: what their kernels do not take, columns in another order among it, becomes int8.

Knows no files. Layers that the checkpoint left plain stay plain on a GPU; on a CPU they become int8, as in models
that are not quantized, but for the output projection (`give_float32_logits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.block import Block, LinearRef
from engine.layers.linear import COLUMN_MULTIPLE, Linear, int8_linear
from engine.layers.mlp import Mlp
from engine.layers.weights import Part
from engine.models.model import Model
from engine.moe.moe import Expert, Moe
from engine.quantization.int4 import as_bfloat16
from engine.quantization.packed_checkpoint import PackedWeights
from engine.quantization.quantize import INT4_ROW_MULTIPLE, give_float32_logits, to_int4, to_int8
from engine.quantization.quantized_rows import QuantizedRows, join_rows

CPU_GROUP_SIZES = (256, 128, 64, 32)  # of torch's 4-bit GEMM
Made = tuple[Linear, str]  # and what it is in a few words


class LinearMaker(Protocol):
    """Makes the linear layers of one device."""

    identity: str  # tells makers apart that make different layers of the same rows
    quantizes_plain: bool  # layers that the checkpoint left plain become int8

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None) -> Made | None:
        """None for rows that no GEMM takes. rows.order is None."""
        ...

    @property
    def of_expert(self) -> Callable[[QuantizedRows], Made | None] | None:
        """`of_rows` for experts, which have no biases, where they are not layers by themselves; else None."""
        ...

    def int8(self, linear: Linear) -> Linear:
        """Quantize a plain layer to int8, or leave it where no GEMM takes it."""
        ...


def can_keep_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has GEMMs for quantized weights with x of that type."""
    return dtype == torch.bfloat16 and (
        device.type != "cpu"
        or (hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and hasattr(torch.ops.aten, "_weight_int8pack_mm"))
    )


def packed_names(skeleton: Model, weights: PackedWeights) -> frozenset[str]:
    """Names of weights whose layers are quantized in all their parts. skeleton: the model, built without storage."""
    names: set[str] = set()
    for ref in skeleton.linears():
        linear = ref.layer
        if linear.weight is not skeleton.embedding and all(weights.is_packed(name) for name in linear.names):
            names.update(linear.names)
    return frozenset(names)


class PackedLinears:
    """Gives every layer that was built without storage its weights. `made` names what they became, for the log.

    identity: what this machine makes of quantized weights, as far as it does not follow from the files.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weights: PackedWeights,
        parts: Mapping[str, Part],
        on_read: Callable[[str], None],
    ) -> None:
        """parts: of weights of which this rank has no more. on_read: called with the name of each that was read."""
        self._dtype = dtype
        self._maker = _maker(dtype, device)
        self._weights, self._parts, self._on_read = weights, parts, on_read
        self._kinds: Counter[str] = Counter()
        self.identity = self._maker.identity

    @property
    def made(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self._kinds.items()))

    def convert(self, block: Block) -> None:
        """Replace the block's linear layers in place. Raises ConfigError for values that cannot be."""
        inner = None
        for ref in block.linears():
            if not isinstance(ref.owner, Mlp | Expert):
                inner = None
            elif ref.attribute == "gate_up":
                inner = self._inner_order(ref.owner.gate_up, ref.owner.down)
            piece = 0
            if isinstance(block, Moe) and ref.owner is block.shared and ref.attribute == "down":
                piece = block.rule.intermediate_size
            self._convert(ref, inner, piece)

    def finish(self, model: Model) -> None:
        """Replace the output projection, when all blocks are done."""
        if give_float32_logits(model):
            self._kinds["float16"] += 1
        else:
            self._convert(LinearRef(model, "head", "head"))

    def _inner_order(self, gate_up: Linear, down: Linear) -> Tensor | None:
        """Outputs of a whole gate_up that this rank takes, where they need not be neighbours; else None.

        Columns of `down` may be in another order (act-order), of which a rank then takes a range: whole groups.
        """
        if gate_up.bias is not None or not gate_up.weight.is_meta or not down.weight.is_meta:
            return None
        (name,) = down.names
        order = self._weights.order(name) if name in self._parts else None
        return None if order is None else order[self._parts[name][1].start : self._parts[name][1].stop]

    def _rows(self, name: str, inner: Tensor | None, is_gate_up: bool) -> QuantizedRows:
        """This rank's part of a weight. inner: see `_inner_order`."""
        part = self._parts.get(name)
        if inner is None or part is None:
            return self._weights.rows(name, part)
        whole = self._weights.rows(name)
        return whole.take_rows(inner) if is_gate_up else replace(whole, order=None).cut_columns(part[1])

    def _convert(self, ref: LinearRef, inner: Tensor | None = None, piece: int = 0) -> None:
        """piece: columns that may be cut off as an expert by themselves; 0: none are."""
        linear = ref.layer
        if linear.weight.is_meta:
            parts = [self._rows(name, inner, ref.attribute == "gate_up") for name in linear.names]
            if piece and self._maker.of_expert is not None:
                parts = [rows.split_groups(piece) for rows in parts]
            is_expert = isinstance(ref.owner, Expert)
            made, kind = linear_of_parts(parts, linear.bias, self._dtype, self._maker, is_expert)
            for name in linear.names:
                self._on_read(name)
        elif self._maker.quantizes_plain:
            made, kind = self._maker.int8(linear), "int8 of plain"
        else:
            made, kind = linear, "plain"
        self._kinds[kind] += 1
        ref.replace(made)


def linear_of_parts(
    parts: list[QuantizedRows], bias: Tensor | None, dtype: torch.dtype, maker: LinearMaker, is_expert: bool = False
) -> Made:
    """The layer whose outputs are those of all parts."""
    rows = join_rows(parts)
    if rows is None:
        return _as_int8(Linear(torch.cat([part.dequantize(dtype) for part in parts]), bias), "unlike parts", maker)
    if is_expert and bias is None and maker.of_expert is not None:
        of_expert = None if rows.order is not None else maker.of_expert(rows)
        return of_expert or _as_int8(Linear(rows.dequantize(dtype)), "other groups or order", maker)
    made = maker.of_rows(replace(rows, order=None), bias)
    if made is None:
        return _as_int8(Linear(rows.dequantize(dtype), bias), "e4m3" if rows.is_fp8 else "other groups", maker)
    linear, kind = made
    return made if rows.order is None else (linear.reordered(rows.order), kind + " reordered")


def _as_int8(plain: Linear, of: str, maker: LinearMaker) -> Made:
    made = maker.int8(plain)
    return made, "dequantized" if made is plain else f"int8 of {of}"


def _maker(dtype: torch.dtype, device: torch.device) -> LinearMaker:
    if device.type == "cpu":
        return CpuLinearMaker(dtype)
    from engine.quantization.gpu_packed_linears import GpuLinearMaker  # needs triton

    return GpuLinearMaker(device)


class CpuLinearMaker:
    """Linear layers over torch's packed GEMMs."""

    quantizes_plain = True
    of_expert = None

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.identity = f"cpu, groups of {CPU_GROUP_SIZES}"

    def of_rows(self, rows: QuantizedRows, bias: Tensor | None) -> Made | None:
        """See LinearMaker."""
        if rows.is_int4:
            linear = self._int4(rows, bias)
            return None if linear is None else (linear, "int4")
        fits = rows.values.shape[1] % COLUMN_MULTIPLE == 0
        if rows.is_int8 and rows.has_row_scales and fits:
            return int8_linear(rows.values, rows.scales[:, 0].to(self._dtype), bias), "int8"
        return None

    def int8(self, linear: Linear) -> Linear:
        """See LinearMaker."""
        return to_int8(linear)

    def _int4(self, rows: QuantizedRows, bias: Tensor | None) -> Linear | None:
        """A 4-bit layer; None for row counts and group sizes that torch's GEMM does not take."""
        num_rows, num_columns = rows.values.shape
        sizes = [size for size in CPU_GROUP_SIZES if rows.group_size % size == 0 and num_columns % size == 0]
        if not sizes or num_rows % INT4_ROW_MULTIPLE or num_columns % rows.group_size:
            return None
        smaller = rows.split_groups(sizes[0])
        scales, offsets = as_bfloat16(smaller.scales), as_bfloat16(smaller.offsets_or_zeros())
        held = QuantizedRows(rows.values, scales, offsets, sizes[0])
        return to_int4(Linear(held.dequantize(self._dtype), bias), held)
