"""Scales of an 8-bit KV cache, folded into a model's weights when it is loaded.

e4m3 rounds to 4 significant bits from 2^-6 to 448, so a scale changes nothing but what falls out of that range. Each
KV head gets one power of two for K and one for V that brings their expected root mean square into [2, 4): two
hundred times that can be stored, and a hundredth keeps all its bits. They follow from the weights alone:
RMS-normed input has components of unit variance, so the mean square of a head's outputs is the mean over its rows of

    sum_i (W_ji * norm_i)^2 + bias_j^2          or, with QK-norm, of norm_j^2

K is divided by its scale in the weights that make it, and q is multiplied in those that make q; V likewise, and the
output projection. Powers of two are exact, so the model computes what it did, to the last bit, with K and V that can
be stored; kernels, blocks and transfers know of no scale, and workers with equal weights have equal KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.decoder import DecoderLayer
from engine.layers.linear import Linear
from engine.models.config import ModelConfig

KV_SCALES = 1  # part of the fingerprint: changes when other scales are chosen
RMS_EXPONENT = 1  # the scaled root mean square lies in [2^1, 2^2)
MAX_EXPONENT = 12  # float16 weights must survive their scale


@torch.inference_mode()
def fold_layer_scales(layer: DecoderLayer, config: ModelConfig) -> None:
    """Scale the layer's weights in place. Layers whose products are not plain `Linear` maps stay as they are."""
    if type(layer.qkv) is Linear and type(layer.attention_output) is Linear:
        k_scales, v_scales = kv_head_scales(layer, config)
        _fold(layer, config, k_scales, v_scales)


def kv_head_scales(layer: DecoderLayer, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Powers of two (num_kv_heads,), float64, that K and V are to be divided by."""
    qkv = layer.qkv
    assert type(qkv) is Linear
    rows = qkv.weight[config.q_size :].double() * layer.attention_norm.double()
    mean_squares = rows.square_().sum(dim=1)
    if qkv.bias is not None:
        mean_squares += qkv.bias[config.q_size :].double().square()
    k, v = mean_squares.view(2, config.num_kv_heads, config.head_dim).mean(dim=2)
    if layer.qk_norm is not None:
        k = layer.qk_norm[config.num_heads :].double().square().mean(dim=1)
    return _scales(k), _scales(v)


def _scales(mean_squares: Tensor) -> Tensor:
    exponents = (torch.log2(mean_squares) / 2).floor() - RMS_EXPONENT
    return torch.exp2(exponents.clamp(-MAX_EXPONENT, MAX_EXPONENT))


def _fold(layer: DecoderLayer, config: ModelConfig, k_scales: Tensor, v_scales: Tensor) -> None:
    qkv, output = layer.qkv, layer.attention_output
    assert type(qkv) is Linear
    assert type(output) is Linear
    group, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
    q_factors = k_scales.repeat_interleave(group)
    qk_factors = torch.cat([q_factors, 1 / k_scales])
    if layer.qk_norm is not None:
        layer.qk_norm.mul_(qk_factors[:, None].to(layer.qk_norm.dtype))
        qk_factors = torch.ones_like(qk_factors)
    row_factors = torch.cat([qk_factors, 1 / v_scales]).repeat_interleave(head_dim)
    qkv.weight.mul_(row_factors[:, None].to(qkv.weight.dtype))
    if qkv.bias is not None:
        qkv.bias.mul_(row_factors.to(qkv.bias.dtype))
    column_factors = v_scales.repeat_interleave(group * head_dim)
    output.weight.mul_(column_factors.to(output.weight.dtype))
