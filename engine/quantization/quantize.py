"""Put quantized linear layers in the place of a model's plain ones while it is built.

A `Quantizer` is called for every block as soon as its weights are there, so that plain weights of one block at a time
are in memory. Models know nothing of it: `Block.linears` says what there is to convert. What a mode means on a CPU
and on a GPU:

    int8-weight   int8_linear    W8A16
    int4-weight   int4_linear    w4a16_layer, of a file's own 4-bit weights alone if most of it are, else of all but
                                 the output projection; int8-weight for others
    w8a8                         W8A8
    fp8                          FP8, and W8A8 for the output projection
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigError
from engine.layers.block import Block
from engine.layers.linear import (
    COLUMN_MULTIPLE,
    Linear,
    half_linear,
    has_half_linear,
    int4_linear,
    int8_linear,
    quantize_int8,
)
from engine.models.model import Model
from engine.quantization.int4 import GROUP_SIZE, quantize_int4
from engine.quantization.quantized_rows import QuantizedRows, join_rows
from kernels.quantization.w4a16_gemm import pack_w4

if TYPE_CHECKING:
    from kernels.gpu.gemm.split_k import SplitKWorkspace

INT4_ROW_MULTIPLE = 16  # of the packed layout on a CPU


class Quantizer:
    """Converts linear layers to those of `quant_mode`; `none` leaves them as they are.

    int4: weights that are 4-bit already, by name; taken out as they are used. None: there are none, so others are
        quantized.
    """

    def __init__(self, quant_mode: str, int4: MutableMapping[str, QuantizedRows] | None, on_gpu: bool) -> None:
        self._mode = quant_mode
        self._int4 = int4
        self._gpu = GpuLinears(quant_mode) if on_gpu and quant_mode != "none" else None
        if quant_mode == "none" or on_gpu:
            return
        needed = "_weight_int4pack_mm_for_cpu" if quant_mode == "int4-weight" else "_weight_int8pack_mm"
        if not hasattr(torch.ops.aten, needed):
            raise ConfigError(f"this torch has no GEMM for {quant_mode}: use --quant-mode none")

    def convert(self, block: Block) -> None:
        """Replace the block's linear layers in place."""
        for ref in block.linears():
            ref.replace(self._convert(ref.layer))

    def finish(self, model: Model) -> None:
        """Replace the output projection, when all blocks are done.

        On a CPU its results are float32 where torch has a GEMM for it: bfloat16 has steps of 1/8 at a logit of 20.
        """
        if give_float32_logits(model):
            return
        model.head = self._convert(model.head, is_head=True)

    def _convert(self, linear: Linear, is_head: bool = False) -> Linear:
        if self._mode == "none":
            return linear
        rows = self._int4_rows(linear, is_head) if self._mode == "int4-weight" else None
        if self._gpu is not None:
            return self._gpu.convert(linear, rows, is_head)
        if rows is not None and linear.weight.shape[0] % INT4_ROW_MULTIPLE == 0:
            return to_int4(linear, rows)
        return to_int8(linear)

    def _int4_rows(self, linear: Linear, is_head: bool) -> QuantizedRows | None:
        """The file's 4-bit rows that `linear` was made of, or all of it quantized; None when it is to be int8."""
        if self._int4 is not None:
            known = linear.names and all(name in self._int4 for name in linear.names)
            rows = join_rows([self._int4.pop(name) for name in linear.names]) if known else None
            if rows is None or rows.group_size % GROUP_SIZE:  # of a rank whose inputs do not begin at a block
                return None
            return rows.cut_rows(range(linear.weight.shape[0]))  # of a rank's vocabulary that ends in padding
        if is_head or linear.weight.shape[1] % GROUP_SIZE:
            return None
        rows = quantize_int4(linear.weight)
        if self._gpu is None:
            linear.weight = rows.dequantize(linear.weight.dtype)  # many rows are multiplied by it
        return rows


def give_float32_logits(model: Model) -> bool:
    """Let a bfloat16 model on a CPU compute its logits in float32. False for others, and where float16 cannot."""
    head = model.head
    if not head.is_plain or head.weight.device.type != "cpu" or head.weight.dtype != torch.bfloat16:
        return False
    if not has_half_linear() or not bool(head.weight.abs().amax() <= torch.finfo(torch.float16).max):
        return False
    model.head = half_linear(head.weight, head.bias)
    model.hidden_dtype = torch.float32
    return True


class GpuLinears:
    """Makes linear layers of one mode on a GPU. They share a workspace, as they run one after the other."""

    def __init__(self, quant_mode: str) -> None:
        # Needs triton.
        from engine.quantization.gpu_linears import FP8, W8A8, W8A16

        kinds, heads = {"fp8": FP8, "w8a8": W8A8}, {"fp8": W8A8}  # int8 keeps more greedy tokens there than e4m3
        self._kind = kinds.get(quant_mode, W8A16)
        self._head_kind = heads.get(quant_mode, self._kind)
        self._workspace: SplitKWorkspace | None = None

    def convert(self, linear: Linear, rows: QuantizedRows | None, is_head: bool = False) -> Linear:
        """rows: those of 4 bits that `linear` was made of, if there are. is_head: it is the output projection."""
        from engine.quantization.gpu_linears import w4a16_layer
        from kernels.gpu.gemm.split_k import SplitKWorkspace

        workspace = self._workspace = self._workspace or SplitKWorkspace(linear.weight.device)
        if rows is not None:
            packed = pack_w4(rows.values, rows.scales, rows.offsets_or_zeros())
            return w4a16_layer(packed, linear.bias, workspace)
        if linear.weight.shape[1] % COLUMN_MULTIPLE:
            return linear
        return (self._head_kind if is_head else self._kind).of(linear, workspace)


def to_int8(linear: Linear) -> Linear:
    """Quantize one plain layer; one that the GEMM does not take stays as it is."""
    if linear.weight.shape[1] % COLUMN_MULTIPLE:
        return linear
    return int8_linear(*quantize_int8(linear.weight), linear.bias)


def to_int4(linear: Linear, rows: QuantizedRows) -> Linear:
    """Pack the rows that `linear.weight` was dequantized from. Their scales and offsets are bfloat16's."""
    scales, offsets = rows.scales.bfloat16(), rows.offsets_or_zeros().bfloat16()
    return int4_linear(rows.values, scales, offsets, rows.group_size, linear.weight, linear.bias)
