"""Linear layers: plain, and with quantized or reordered weights on a CPU.

A model is built with `Linear`; loaders put others with the same call in its place (`Block.linears`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class LinearLayer(Protocol):
    """[..., in] -> [..., out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Linear:
    """y = x W^T + b. `names`: the checkpoint's weights whose rows follow each other in W."""

    __slots__ = ("bias", "names", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, names: tuple[str, ...] = ()) -> None:
        self.weight = weight  # (out, in)
        self.bias = bias
        self.names = names

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def tensors(self) -> list[Tensor]:
        """All that the layer is: with the contents of another's, it is that one."""
        return [self.weight, *([] if self.bias is None else [self.bias])]

    def take_over(self, tensors: Sequence[Tensor]) -> None:
        """Become a layer of the same shape, in the same memory. tensors: see `tensors`."""
        for own, other in zip(self.tensors(), tensors, strict=True):
            own.copy_(other)


class PackedLinear:
    """A bfloat16 weight in the order in which oneDNN reads it, which it would otherwise bring about in every GEMM.

    All layers' GEMMs of SmolLM2-135M on one core, plain and packed: 8 rows 24.1 and 14.0 ms, 16 rows 22.9 and
    16.1, 512 rows 269 and 261 (two cores: 149 and 137).
    """

    __slots__ = ("_gemm", "bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # None: for any number of rows
        self.bias = bias
        self._gemm = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._gemm(x, self.packed, self.bias, "none", [], "")
        return y

    def repack(self, weight: Tensor) -> None:
        """Become the layer of another weight of the same shape."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)


def dense_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear | Linear:
    """The faster of `PackedLinear` and `Linear` that this machine has. weight: (out, in), may be given up after."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if fits and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return Linear(weight, bias)


class HalfLinear:
    """A weight in float16, x and y in float32: torch's GEMM for few rows of float32 (FBGEMM), on x86 only.

    A row's result does not depend on the rows beside it. bfloat16 weights lose nothing but what float16 has no
    exponent for, below 1e-7. [49152, 576] on two cores: 0.9 ms at 1 row, 1.4 at 8, 2.9 at 16, 12 at 64; PackedLinear
    0.9, 1.2, 1.7, 4.8.
    """

    __slots__ = ("_gemm", "bias", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self._gemm = torch.ops.quantized.linear_dynamic_fp16.default

    @staticmethod
    def is_available() -> bool:
        return "fbgemm" in torch.backends.quantized.supported_engines

    @property
    def weight(self) -> Tensor:
        """(out, in) float32, computed anew."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self.packed)[0]
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._gemm(x, self.packed)
        return y


class Int8Linear:
    """Int8 weights with one scale per output row for few rows of x, a dense copy of them for many.

    Both paths are the same function up to rounding, so a sequence may cross from one to the other. torch's GEMM
    works through the weight once per 4 rows of x: [49152, 576] takes 1.0 ms at 1 row, 2.0 at 4 and 3.9 at 8 on one
    core, the packed bfloat16 copy 1.8, 2.1 and 2.5.
    """

    MAX_INT8_ROWS = 4
    COLUMN_MULTIPLE = 16  # with others torch's GEMM reads beyond a row of x, and what it finds there may be NaN

    __slots__ = ("bias", "dense", "scales", "weight_int8")

    def __init__(self, weight_int8: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.weight_int8 = weight_int8  # (out, in) int8
        self.scales = scales  # (out,) in the dtype of x
        self.dense = dense_linear(self.weight, bias)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """(out, in) in the dtype of x, computed anew: weight_int8 * scales."""
        return self.weight_int8.to(self.scales.dtype).mul_(self.scales[:, None])

    def __call__(self, x: Tensor) -> Tensor:
        return self.dense(x) if x.shape[0] > self.MAX_INT8_ROWS else self.quantized(x)

    def quantized(self, x: Tensor) -> Tensor:
        """The GEMM of the quantized weight, whatever the number of rows."""
        y: Tensor = torch._weight_int8pack_mm(x, self.weight_int8, self.scales)
        return y if self.bias is None else y.add_(self.bias)

    def tensors(self) -> list[Tensor]:
        """See Linear."""
        return [self.weight_int8, self.scales, *([] if self.bias is None else [self.bias])]

    def take_over(self, tensors: Sequence[Tensor]) -> None:
        """See Linear."""
        for own, other in zip(self.tensors(), tensors, strict=True):
            own.copy_(other)
        if isinstance(self.dense, PackedLinear):
            self.dense.repack(self.weight)
        else:
            self.dense.weight.copy_(self.weight)


class Int4Linear:
    """Like `Int8Linear`, with 4-bit weights that share a scale and an offset per 32 columns.

    [3072, 576] at 1 row takes 33 us, int8 57; [49152, 576] 0.56 ms and 0.83.
    """

    MAX_INT4_ROWS = 8

    __slots__ = ("bias", "dense", "group_size", "packed", "scales_and_zeros")

    def __init__(
        self, values: Tensor, scales: Tensor, zeros: Tensor, group_size: int, weight: Tensor, bias: Tensor | None
    ) -> None:
        """values: (out, in), 0 to 15. scales, zeros: bfloat16 (out, in / group_size). weight: the same numbers."""
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 2)
        self.scales_and_zeros = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()
        self.group_size = group_size
        self.dense = dense_linear(weight, bias)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.dense(x) if x.shape[0] > self.MAX_INT4_ROWS else self.quantized(x)

    def quantized(self, x: Tensor) -> Tensor:
        """The GEMM of the quantized weight, whatever the number of rows."""
        y: Tensor = torch._weight_int4pack_mm_for_cpu(x, self.packed, self.group_size, self.scales_and_zeros)
        return y if self.bias is None else y.add_(self.bias)


def two_rows_at_least(linear: LinearLayer, x: Tensor) -> Tensor:
    """Compute a single row twice: libraries add up its products in another order than those of several rows."""
    return linear(x.expand(2, -1))[:1] if x.shape[0] == 1 else linear(x)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to 255 levels: int8 [out, in], scales [out] in the dtype of `weight`."""
    scales = (weight.abs().amax(dim=1).float() / 127.0).clamp_min(1e-12).to(weight.dtype)
    values = (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales
