"""Swap a loaded model's linear maps for quantized ones. Models and loaders do not know about it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.errors import ConfigError
from engine.layers.decoder import DecoderModel
from engine.layers.linear import Int4Linear, Int8Linear, Linear, LinearMap, quantize_int8
from engine.loader.gguf_int4 import GROUP_SIZE, Int4Rows

INT4_ROW_MULTIPLE = 16  # of the packed layout


def quantize_model(model: DecoderModel, quant_mode: str, int4: Mapping[str, Int4Rows]) -> None:
    """Replace every linear map in place. `none` leaves the model as it is.

    int4: weights that are 4-bit already, by name. With `int4-weight`, maps made of those keep them; the others,
    often the output projection, become int8.
    """
    if quant_mode == "none":
        return
    needed = "_weight_int4pack_mm_for_cpu" if quant_mode == "int4-weight" else "_weight_int8pack_mm"
    if not hasattr(torch.ops.aten, needed):
        raise ConfigError(f"this torch has no product for {quant_mode}: use --quant-mode none")

    def convert(linear: LinearMap) -> LinearMap:
        assert isinstance(linear, Linear)
        fits = linear.weight.shape[0] % INT4_ROW_MULTIPLE == 0
        if quant_mode == "int4-weight" and linear.names and fits and all(name in int4 for name in linear.names):
            return to_int4(linear, [int4[name] for name in linear.names])
        return to_int8(linear)

    is_tied = isinstance(model.lm_head, Linear) and model.lm_head.weight is model.embedding
    for layer in model.layers:
        layer.qkv = convert(layer.qkv)
        layer.attention_output = convert(layer.attention_output)
        layer.gate_up = convert(layer.gate_up)
        layer.down = convert(layer.down)
    head = model.lm_head = convert(model.lm_head)
    if is_tied and isinstance(head, Int8Linear):  # keep one copy
        model.embedding = head.weight


def to_int8(linear: Linear) -> Int8Linear:
    """Quantize one plain map."""
    quantized, scales = quantize_int8(linear.weight)
    dequantized = quantized.to(scales.dtype).mul_(scales[:, None])
    return Int8Linear(quantized, scales, dequantized, linear.bias)


def to_int4(linear: Linear, parts: list[Int4Rows]) -> Int4Linear:
    """Pack the rows that `linear.weight` was dequantized from."""
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts])
    zeros = torch.cat([part.zeros for part in parts])
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)
    scales_and_zeros = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()
    return Int4Linear(packed, scales_and_zeros, GROUP_SIZE, linear.weight, linear.bias)
