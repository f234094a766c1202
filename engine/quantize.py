"""Swap a loaded model's linear maps for quantized ones. Models and loaders do not know about it."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from engine.layers.decoder import DecoderModel
from engine.layers.linear import Int8Linear, Linear, LinearMap, quantize_int8


def quantize_model(model: DecoderModel, quant_mode: str) -> None:
    """Replace every linear map in place. `none` leaves the model as it is."""
    if quant_mode == "none":
        return
    if quant_mode != "int8-weight":
        raise ConfigError(f"unknown quantization {quant_mode!r}")
    if not hasattr(torch.ops.aten, "_weight_int8pack_mm"):
        raise ConfigError("this torch has no int8 weight product: use --quant-mode none")
    is_tied = isinstance(model.lm_head, Linear) and model.lm_head.weight is model.embedding
    for layer in model.layers:
        layer.qkv = to_int8(layer.qkv)
        layer.attention_output = to_int8(layer.attention_output)
        layer.gate_up = to_int8(layer.gate_up)
        layer.down = to_int8(layer.down)
    model.lm_head = to_int8(model.lm_head)
    if is_tied:  # keep one copy
        model.embedding = model.lm_head.weight


def to_int8(linear: LinearMap) -> Int8Linear:
    """Quantize one plain map."""
    assert isinstance(linear, Linear)
    quantized, scales = quantize_int8(linear.weight)
    dequantized = quantized.to(scales.dtype).mul_(scales[:, None])
    return Int8Linear(quantized, scales, dequantized, linear.bias)
