"""Linear layers: one class for all, over a weight as a device's GEMM reads it, and the GEMMs of CPUs.

A model is built with plain weights; loaders put layers with others in their place (`Block.linears`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu_features import has_bfloat16_gemms

LinearLayer = Callable[[Tensor], Tensor]
"""[..., in] -> [..., out]."""


def plain(linear: Linear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


class Linear:
    """y = x[..., order] W^T + b, by the GEMM that reads W in this form.

    weight: (out, in) in the type of x, or what `gemm` reads. scales: of a quantized weight, and offsets if they are
    stored together. group_size: columns that share them; 0: all. names: the checkpoint's weights whose rows follow
    each other in W. order: which column of x each of W is multiplied by, (in,) int64; None: as they are.
    dense: the same layer for more than `max_rows` rows, if it is faster there. workspace: of a GEMM that needs one,
    shared by layers that run one after the other.
    """

    __slots__ = (
        "bias", "dense", "gemm", "group_size", "max_rows", "names", "num_columns", "order", "scales", "weight",
        "workspace",
    )  # fmt: skip

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, names: tuple[str, ...] = (), *,
        gemm: Callable[[Linear, Tensor], Tensor] = plain, scales: Tensor | None = None, group_size: int = 0,
        num_columns: int = 0, dense: Linear | None = None, max_rows: int = 0, workspace: Any = None,
    ) -> None:  # fmt: skip
        """num_columns: of x; 0: those of `weight`."""
        self.weight, self.bias, self.names = weight, bias, names
        self.gemm, self.scales, self.group_size = gemm, scales, group_size
        self.num_columns = num_columns
        self.order: Tensor | None = None
        self.dense, self.max_rows, self.workspace = dense, max_rows, workspace

    def __call__(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if self.dense is not None and x.shape[0] > self.max_rows:
            return self.dense(x)
        return self.gemm(self, x)

    @property
    def is_plain(self) -> bool:
        """Whether the weight is one that any code can read."""
        return self.gemm is plain and self.order is None

    def changed(self, **attributes: Any) -> Linear:
        """The layer with other values of these attributes. Weights are shared."""
        linear = copy.copy(self)
        for name, value in attributes.items():
            setattr(linear, name, value)
        return linear

    def tensors(self) -> list[Tensor]:
        """All that the layer is: with the contents of another's, it is that one."""
        return [each for each in (self.weight, self.scales, self.bias) if each is not None]


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


def two_rows_at_least(linear: LinearLayer, x: Tensor) -> Tensor:
    """Compute a single row twice: libraries add up its products in another order than those of several rows."""
    return linear(x.expand(2, -1))[:1] if x.shape[0] == 1 else linear(x)


_ONEDNN = torch.ops.mkldnn._linear_pointwise.default
_HALF = torch.ops.quantized.linear_dynamic_fp16.default
