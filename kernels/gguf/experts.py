"""Experts over weights in GGUF blocks, with all experts of few tokens in one call (`experts.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.gguf.linear import BlockWeight
from kernels.native.library import library as native_library

BlockLayer = tuple[BlockWeight, Tensor | None]
"""A weight and its bias, bfloat16 and contiguous."""


class _Layer(ctypes.Structure):
    _fields_ = [("segments", ctypes.c_void_p), ("count", ctypes.c_int64), ("bias", ctypes.c_void_p)]

    @classmethod
    def of(cls, weight: BlockWeight, bias: Tensor | None) -> _Layer:
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
        return cls(ctypes.addressof(weight.segments), len(weight.parts), None if bias is None else bias.data_ptr())


class _Expert(ctypes.Structure):
    _fields_ = [("gate_up", _Layer), ("down", _Layer)]


class BlockExperts:
    """y_t = sum over the experts e that token t chose of p_te down_e(silu(gate_e x_t) * up_e x_t), in integers.

    Each product is rounded to bfloat16, as if layers were computed one after the other.
    """

    def __init__(
        self, experts: Mapping[int, tuple[BlockLayer, BlockLayer]], max_rows: int, alpha: float, limit: float
    ) -> None:
        """experts: gate_up and down, which have integer GEMMs, by index. max_rows: most tokens per expert; 0: any.

        alpha, limit: see `silu_mul`.
        """
        native = native_library()
        assert native is not None, "it is compiled where this one is"
        self._silu_mul = ctypes.cast(native.native_silu_mul, ctypes.c_void_p)
        self._layers, self._max_rows, self._gate = dict(experts), max_rows, (alpha, limit)  # keeps segments' memory
        (gate_up, _), (down, _) = next(iter(self._layers.values()))
        self._function = gate_up.library.gguf_experts
        self._hidden, self._inner = gate_up.num_columns, down.num_columns
        self._table = (_Expert * (max(experts) + 1))()
        for index, layers in self._layers.items():
            self._table[index] = _Expert(*(_Layer.of(*layer) for layer in layers))

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor | None:
        """Compute the experts. x: bfloat16 (num_tokens, hidden). shares: float32, chosen: int64, (num_tokens, any
        number); other experts than `experts` are left out.

        Returns float32 (num_tokens, hidden), or None if an expert has too many tokens.
        """
        assert (x.dtype, shares.dtype, chosen.dtype) == (torch.bfloat16, torch.float32, torch.int64)
        x, shares, chosen = x.contiguous(), shares.contiguous(), chosen.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        is_done = self._function(
            self._table, len(self._table), self._hidden, self._inner, x.data_ptr(), x.shape[0], chosen.data_ptr(),
            shares.data_ptr(), chosen.shape[1], self._max_rows, self._silu_mul, *self._gate, out.data_ptr(),
        )  # fmt: skip
        return out if is_done else None
