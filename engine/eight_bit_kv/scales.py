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

from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.eight_bit_kv.settings import KvDtypeSettings
from engine.layers.attention import Attention
from engine.layers.block import Block

KV_SCALES = 1  # part of the fingerprint: changes when other scales are chosen
RMS_EXPONENT = 1  # the scaled root mean square lies in [2^1, 2^2)
MAX_EXPONENT = 12  # float16 weights must survive their scale


def stored_dtype(config: EngineConfig) -> torch.dtype | None:
    """What KV is stored as; None: what the model computes in."""
    return None if config.of(KvDtypeSettings).kv_cache_dtype == "auto" else torch.float8_e4m3fn


def identity_of(config: EngineConfig) -> dict[str, Any]:
    """What tells a model apart whose KV is stored so."""
    asked = config.of(KvDtypeSettings).kv_cache_dtype
    return {} if asked == "auto" else {"kv_cache": [asked, KV_SCALES]}


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for a GPU that cannot convert from and to 8-bit floating point, if it has to."""
    if device.type != "cuda" or stored_dtype(config) is None:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or newer, this one has "
            f"{capability[0]}.{capability[1]}: use --kv-cache-dtype auto"
        )


def fold_if_asked(config: EngineConfig, block: Block) -> None:
    """Scale the weights of attention, if KV is stored in 8 bits."""
    if isinstance(block, Attention) and stored_dtype(config) is not None:
        fold_kv_scales(block)


@torch.inference_mode()
def fold_kv_scales(block: Attention) -> None:
    """Scale the block's weights in place. Blocks without plain weights stay as they are."""
    if all(ref.layer.is_plain for ref in block.linears()):
        k_scales, v_scales = kv_head_scales(block)
        _fold(block, k_scales, v_scales)


def kv_head_scales(block: Attention) -> tuple[Tensor, Tensor]:
    """Powers of two (num_kv_heads,), float64, that K and V are to be divided by."""
    qkv = block.qkv
    q_size = block.num_heads * block.head_dim
    rows = qkv.weight[q_size:].double() * block.norm.double()
    mean_squares = rows.square_().sum(dim=1)
    if qkv.bias is not None:
        mean_squares += qkv.bias[q_size:].double().square()
    k, v = mean_squares.view(2, block.num_kv_heads, block.head_dim).mean(dim=2)
    if block.qk_norm is not None:
        k = block.qk_norm[block.num_heads :].double().square().mean(dim=1)
    return _scales(k), _scales(v)


def _scales(mean_squares: Tensor) -> Tensor:
    exponents = (torch.log2(mean_squares) / 2).floor() - RMS_EXPONENT
    return torch.exp2(exponents.clamp(-MAX_EXPONENT, MAX_EXPONENT))


def _fold(block: Attention, k_scales: Tensor, v_scales: Tensor) -> None:
    qkv, output = block.qkv, block.output
    group, head_dim = block.num_heads // block.num_kv_heads, block.head_dim
    q_factors = k_scales.repeat_interleave(group)
    qk_factors = torch.cat([q_factors, 1 / k_scales])
    if block.qk_norm is not None:
        block.qk_norm.mul_(qk_factors[:, None].to(block.qk_norm.dtype))
        qk_factors = torch.ones_like(qk_factors)
    row_factors = torch.cat([qk_factors, 1 / v_scales]).repeat_interleave(head_dim)
    qkv.weight.mul_(row_factors[:, None].to(qkv.weight.dtype))
    if qkv.bias is not None:
        qkv.bias.mul_(row_factors.to(qkv.bias.dtype))
    column_factors = v_scales.repeat_interleave(group * head_dim)
    output.weight.mul_(column_factors.to(output.weight.dtype))
