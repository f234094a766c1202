"""GEMMs of CPU libraries, as layers and as what a layer is over: oneDNN's of bfloat16, FBGEMM's of float16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Linear, LinearLayer
from engine.models.model import Model
from kernels.cpu_features import has_bfloat16_gemms


def onednn(linear: Linear, x: Tensor) -> Tensor:
    y: Tensor = _ONEDNN(x, linear.weight, linear.bias, "none", [], "")
    return y


def dense_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The layer over a copy in the form that this CPU's fastest GEMM reads; over `weight` itself where it has none.

    oneDNN would bring a bfloat16 weight into its order in every GEMM. All layers' GEMMs of SmolLM2-135M on one core,
    plain and so: 8 rows 24.1 and 14.0 ms, 16 rows 22.9 and 16.1, 512 rows 269 and 261 (two cores: 149 and 137).
    Where it has no GEMM of bfloat16 (no AVX-512), FBGEMM's float16 one is 8 times as fast as torch's.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return Linear(weight, bias)
    if has_bfloat16_gemms():
        for_any_rows = None
        return Linear(torch.ops.mkldnn._reorder_linear_weight(weight, for_any_rows), bias, gemm=onednn)
    if fits_half(weight):
        return Linear(half_linear(weight, bias).weight, gemm=half_of_bfloat16, num_columns=weight.shape[1])
    return Linear(weight, bias)


def fits_half(weight: Tensor) -> bool:
    """Whether this machine has a GEMM for `half_linear`, and float16 the range of the weight."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return bool(weight.abs().amax() <= torch.finfo(torch.float16).max)


def half(linear: Linear, x: Tensor) -> Tensor:
    """A row's result does not depend on the rows that follow or precede it, given AVX-512; see `in_threes`."""
    y: Tensor = _HALF(x, linear.weight)
    return y


def half_of_bfloat16(linear: Linear, x: Tensor) -> Tensor:
    """`half` for x and y in bfloat16."""
    return in_threes(lambda wide: half(linear, wide), x.float()).to(x.dtype)


def half_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The layer in float16, x and y in float32: torch's GEMM for few rows of float32 (FBGEMM), on x86 only.

    bfloat16 weights lose nothing but what float16 has no exponent for, below 1e-7. [49152, 576] on two cores: 0.9 ms
    at 1 row, 1.4 at 8, 2.9 at 16, 12 at 64; oneDNN's 0.9, 1.2, 1.7, 4.8.
    """
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
    return Linear(packed, gemm=half)


def in_threes(gemm: LinearLayer, x: Tensor) -> Tensor:
    """Compute with a multiple of three rows: FBGEMM's kernels of AVX2 add up one or two rows in another order.

    Those compute what is left after blocks of six rows. One row of [49152, 576] takes 6.8 ms so instead of 6.2.
    """
    missing = -x.shape[0] % 3
    return gemm(functional.pad(x, (0, 0, 0, missing)))[: x.shape[0]] if missing else gemm(x)


def give_float32_logits(model: Model) -> bool:
    """Let a bfloat16 model on a CPU compute its logits in float32: bfloat16 has steps of 1/8 at a logit of 20.

    False for others, and where float16, which torch has such a GEMM for, cannot hold the weight.
    """
    head = model.head
    if not head.is_plain or head.weight.device.type != "cpu" or head.weight.dtype != torch.bfloat16:
        return False
    if not fits_half(head.weight):
        return False
    model.head = half_linear(head.weight, head.bias)
    model.hidden_dtype = torch.float32
    return True


_ONEDNN = torch.ops.mkldnn._linear_pointwise.default
_HALF = torch.ops.quantized.linear_dynamic_fp16.default
