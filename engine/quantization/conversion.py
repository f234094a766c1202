"""Converts a model's linear layers while it is built, by the settings, the checkpoint and the device.

    checkpoint's weights           --quant-mode auto     a mode
    packed (GPTQ, AWQ, FP8)        kept                  dequantized, then quantized
    MXFP4 experts                  kept                  dequantized, then quantized
    GGUF blocks, if most are of 4 bits (on GPUs: 4 to 6)
                                   kept                  those of 4 bits kept with int4-weight, others to int8
    plain                          to int8, on CPUs (*)  quantized; int4-weight: the output projection to int8

(*) To blocks of Q8_0 where `engine/gguf` has kernels for them: `engine/gguf/choose.py`.

Each block's layers are converted as soon as its weights are read, so the whole model never exists dequantized.
`CpuLinears` and `GpuLinears` choose GEMMs by the quantized rows, not by the checkpoint's format.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.errors import ConfigError, UnsupportedModelError
from engine.config import EngineConfig
from engine.cpu_gemms.gemms import give_float32_logits
from engine.layers.block import Block, LinearRef
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.layers.weights import Part, WeightSource
from engine.loader.conversion import Conversion
from engine.models.model import Model
from engine.moe.moe import Expert, Moe
from engine.quantization.cpu_linears import CpuLinears
from engine.quantization.int4 import GROUP_SIZE, BlockSource, quantize_int4
from engine.quantization.mxfp4 import Mxfp4Source
from engine.quantization.packed_checkpoint import PackedWeights
from engine.quantization.quantized_rows import Made, QuantizedRows, join_rows
from kvstore.layout import Shard

if TYPE_CHECKING:
    from engine.quantization.gpu_linears import GpuLinears

logger = logging.getLogger(__name__)
GPU_CAPABILITIES = {"fp8": (8, 9), "w8a8": (8, 0)}  # modes of GPUs alone: the compute capability they need
CPU_GEMMS = {"int4-weight": "_weight_int4pack_mm_for_cpu", "int8-weight": "_weight_int8pack_mm"}
EXPERTS = "on a GPU a layer's experts must all be quantized, shared ones too, or none: use --quant-mode none"


class QuantizedConversion(Conversion):
    """Converts the linear layers of a model to quantized ones, see Conversion."""

    def __init__(
        self, quant_mode: str, linears: CpuLinears | GpuLinears | None = None, stored: WeightSource | None = None,
        stays: bool = False, plain_mode: str | None = None, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        """linears: None if nothing is quantized. stored: the checkpoint. stays: its quantized weights are kept.
        plain_mode: the mode for other weights.
        """
        super().__init__(quant_mode)
        self._plain_mode = plain_mode or quant_mode
        self._linears, self._stored, self._stays, self._dtype = linears, stored, stays, dtype
        self._names: frozenset[str] = frozenset()  # of weights whose layers are made of the stored rows
        self._parts: Mapping[str, Part] = {}
        self._on_read: Callable[[str], None] = lambda _name: None
        self._kinds: Counter[str] = Counter()
        if stays and linears is not None and isinstance(stored, PackedWeights):
            self.identity["linears"] = linears.identity

    @property
    def leaves_attention_plain(self) -> bool:
        return not self._stays or isinstance(self._stored, Mxfp4Source)

    def keep(self, skeleton: Model) -> frozenset[str]:
        """See Conversion: the weights of layers all of whose parts are quantized."""
        stored = self._stored
        if not self._stays or not isinstance(stored, PackedWeights | BlockSource | Mxfp4Source):
            return frozenset()
        is_tied = skeleton.head.weight is skeleton.embedding
        is_gguf = isinstance(stored, BlockSource)
        if isinstance(stored, BlockSource) and self._linears is not None:
            stored.kept_bits = self._linears.block_bits
        layers = [ref.layer for ref in skeleton.linears() if is_gguf or not (is_tied and ref.owner is skeleton)]
        packed = (layer.names for layer in layers if all(map(stored.is_packed, layer.names)))
        self._names = frozenset(chain.from_iterable(packed))
        if is_gguf:
            if any(isinstance(block, Moe) for block in skeleton.blocks):  # whose experts must all be quantized
                self._plain_mode = "int8-weight"
            return self._names.difference(skeleton.head.names)  # float32 logits and embeddings need the plain weight
        if isinstance(stored, PackedWeights) and self._linears is not None and self._linears.stacks_experts:
            _check_experts(skeleton, self._names)
        return self._names

    def start(self, parts: Mapping[str, Part], on_read: Callable[[str], None]) -> None:
        self._parts, self._on_read = parts, on_read

    def convert(self, block: Block) -> None:
        if self._stays and isinstance(self._stored, Mxfp4Source):
            self._stored.give_experts(block, self._parts, self._on_read)
            return
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
        if give_float32_logits(model):
            self._kinds["float16"] += 1
        else:
            self._convert(LinearRef(model, "head"))

    def end(self) -> None:
        if isinstance(self._stored, PackedWeights):
            self._stored.check_idle_biases()
            made = ", ".join(f"{count} {kind}" for kind, count in sorted(self._kinds.items()))
            held = f"are {made}" if self._stays else "were dequantized"
            logger.info("%s: linear layers %s", self._stored.quantization.label, held)

    def _convert(self, ref: LinearRef, inner: Tensor | None = None, piece: int = 0) -> None:
        """Convert one layer. inner: see `_inner_order`. piece: columns that may be cut off as an expert; 0: none."""
        linear = ref.layer
        if self._linears is None:
            made, kind = linear, "plain"
        elif self._is_kept(linear):
            parts = [self._rows(name, inner, ref.attribute == "gate_up") for name in linear.names]
            if piece and self._linears.stacks_experts:
                parts = [rows.split_groups(piece) for rows in parts]
            is_expert = isinstance(ref.owner, Expert)
            made, kind = linear_of_rows(parts, linear.bias, self._dtype, self._linears, is_expert)
            for name in linear.names:
                self._on_read(name)
        else:
            made, kind = self._of_plain(linear, self._linears, is_head=isinstance(ref.owner, Model))
        self._kinds[kind] += 1
        ref.replace(made)

    def _of_plain(self, linear: Linear, linears: CpuLinears | GpuLinears, is_head: bool) -> Made:
        mode = self._plain_mode
        if mode == "none":
            return linear, "plain"
        if mode == "int4-weight" and not is_head and linear.weight.shape[1] % GROUP_SIZE == 0:
            return linear_of_rows([quantize_int4(linear.weight)], linear.bias, linear.weight.dtype, linears)
        return linears.of_plain(linear, mode, is_head), "int8 of plain"

    def _is_kept(self, linear: Linear) -> bool:
        return bool(linear.names) and self._names.issuperset(linear.names)

    def _inner_order(self, gate_up: Linear, down: Linear) -> Tensor | None:
        """Return the outputs of the whole gate_up that this rank takes, if they are not contiguous; else None.

        `down` may store its columns in another order (act-order). A rank then takes a range of that order, in whole
        groups.
        """
        if gate_up.bias is not None or not self._is_kept(gate_up) or not self._is_kept(down):
            return None
        (name,) = down.names
        if name not in self._parts or not isinstance(self._stored, PackedWeights):
            return None
        order, columns = self._stored.order(name), self._parts[name][1]
        return None if order is None else order[columns.start : columns.stop]

    def _rows(self, name: str, inner: Tensor | None, is_gate_up: bool) -> QuantizedRows:
        """Return this rank's part of a weight. inner: see `_inner_order`."""
        assert isinstance(self._stored, PackedWeights | BlockSource), "others' layers are not made of rows"
        part = self._parts.get(name)
        if inner is None or part is None:
            return self._stored.rows(name, part)
        whole = self._stored.rows(name)
        return whole.take_rows(inner) if is_gate_up else replace(whole, order=None).cut_columns(part[1])


def choose_conversion(
    weights: WeightSource, config: EngineConfig, dtype: torch.dtype, device: torch.device, shard: Shard
) -> Conversion:
    """See `Source.conversion`."""
    is_auto = config.quant_mode == "auto"
    if is_auto and isinstance(weights, PackedWeights) and can_keep_packed(dtype, device):
        linears = linears_of(dtype, device)
        plain_mode = "int8-weight" if linears.quantizes_plain else "none"
        return QuantizedConversion(weights.quantization.label, linears, weights, True, plain_mode, dtype)
    has_int4 = isinstance(weights, BlockSource) and weights.has_most_in((4,))
    if is_auto and isinstance(weights, BlockSource) and can_keep_on_gpu(dtype, device):
        linears = linears_of(dtype, device)
        if weights.has_most_in(linears.block_bits):
            return QuantizedConversion(weights.label, linears, weights, True, "none", dtype)
    if is_auto and shard.size > 1 and not has_int4:
        mode = "none"
    else:
        mode = resolve_quant_mode(config, dtype, device, has_int4)
    made = None if mode == "none" else linears_of(dtype, device)
    if has_int4 and mode == "int4-weight":
        return QuantizedConversion(mode, made, weights, True, "int8-weight", dtype)
    if is_auto and isinstance(weights, Mxfp4Source) and can_keep_on_gpu(dtype, device):
        return QuantizedConversion("mxfp4", made, weights, True, mode, dtype)
    return QuantizedConversion(mode, made, weights, False, dtype=dtype)


def linears_of(dtype: torch.dtype, device: torch.device) -> CpuLinears | GpuLinears:
    """Return the object that makes quantized layers on that device."""
    if device.type == "cpu":
        return CpuLinears(dtype)
    from engine.quantization.gpu_linears import GpuLinears  # needs triton

    return GpuLinears(device)


def linear_of_rows(
    parts: list[QuantizedRows], bias: Tensor | None, dtype: torch.dtype, linears: CpuLinears | GpuLinears,
    is_expert: bool = False,
) -> Made:  # fmt: skip
    """Make a layer from the concatenated rows of all parts, in int8 if no GEMM supports them."""
    rows, is_stacked = join_rows(parts), is_expert and bias is None and linears.stacks_experts
    made = None
    if rows is None:
        weight, reason = torch.cat([part.dequantize(dtype) for part in parts]), "unlike parts"
    else:
        if rows.order is None or not is_stacked:
            made = linears.of_rows(replace(rows, order=None), bias, is_stacked)
        if made is not None:
            return made if rows.order is None else (replace(made[0], order=rows.order), f"{made[1]} reordered")
        reason = "other groups or order" if is_stacked else "e4m3" if rows.is_fp8 else "other groups"
        weight = rows.dequantize(dtype)
    plain = Linear(weight, bias)
    linear = linears.of_plain(plain)
    return linear, "dequantized" if linear is plain else f"int8 of {reason}"


def can_keep_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has GEMMs for quantized weights with x of that dtype."""
    return dtype == torch.bfloat16 and (
        device.type != "cpu" or all(hasattr(torch.ops.aten, gemm) for gemm in CPU_GEMMS.values())
    )


def can_keep_on_gpu(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for GGUF blocks and MXFP4 experts with x of that dtype."""
    return device.type == "cuda" and dtype == torch.bfloat16


def resolve_quant_mode(
    engine_config: EngineConfig, dtype: torch.dtype, device: torch.device, has_int4: bool = False
) -> str:
    """Resolve `auto`: with bfloat16 on a CPU the file's 4-bit weights if it has them, otherwise int8; elsewhere none.

    Raises ConfigError for modes without a kernel or without weights.
    """
    wanted = engine_config.quant_mode
    if wanted == "auto":
        fits = device.type == "cpu" and dtype == torch.bfloat16
        wanted = ("int4-weight" if has_int4 else "int8-weight") if fits else "none"
    if wanted == "none":
        return wanted
    if dtype != torch.bfloat16:
        raise ConfigError(f"--quant-mode {wanted} needs --dtype bfloat16; use --quant-mode none")
    if wanted in GPU_CAPABILITIES:
        if device.type == "cpu":
            raise ConfigError(f"--quant-mode {wanted} needs a GPU; on a CPU use int8-weight")
        needed, found = GPU_CAPABILITIES[wanted], torch.cuda.get_device_capability(device)
        if found < needed:
            raise ConfigError(
                f"--quant-mode {wanted} needs a GPU of compute capability {needed[0]}.{needed[1]}, this one has "
                f"{found[0]}.{found[1]}; use int8-weight"
            )
    elif device.type == "cpu" and not hasattr(torch.ops.aten, CPU_GEMMS[wanted]):
        raise ConfigError(f"this torch has no GEMM for {wanted}: use --quant-mode none")
    return wanted


def _check_experts(skeleton: Model, kept: frozenset[str]) -> None:
    """Check that a layer's experts are quantized alike, as grouped kernels need. Raises UnsupportedModelError."""
    for block in skeleton.blocks:
        if isinstance(block, Moe):
            experts = [*block.experts.values(), *([] if block.shared is None else [block.shared])]
            for layers in zip(*((expert.gate_up, expert.down) for expert in experts), strict=True):
                if len({kept.issuperset(layer.names) for layer in layers}) > 1:
                    raise UnsupportedModelError(EXPERTS)
