"""Experts over weights as a GGUF file holds them, those that few tokens chose in one call (`experts.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.gguf.linear import BlockWeight
from kernels.native.library import library as native_library


class _Expert(ctypes.Structure):
    _fields_ = [
        ("gate_up", ctypes.c_void_p), ("down", ctypes.c_void_p), ("num_gate_up", ctypes.c_int64),
        ("num_down", ctypes.c_int64),
    ]  # fmt: skip


class BlockExperts:
    """y_t = sum over the experts e that token t chose of p_te down_e(silu(gate_e x_t) * up_e x_t), in integers.

    Each product is rounded to bfloat16, as of one layer after the other.
    """

    def __init__(self, experts: Mapping[int, tuple[BlockWeight, BlockWeight]], max_rows: int) -> None:
        """experts: gate_up and down, which have integers, by their index. max_rows: tokens of an expert; 0: any."""
        native = native_library()
        assert native is not None, "it is compiled where this one is"
        self._gate = ctypes.cast(native.native_silu_mul, ctypes.c_void_p)
        self._weights, self._max_rows = dict(experts), max_rows  # segments lie in the weights
        gate_up, down = next(iter(self._weights.values()))
        self._function = gate_up.library.gguf_experts
        self._hidden, self._inner = gate_up.num_columns, down.num_columns
        self._table = (_Expert * (max(experts) + 1))()
        for index, (gate_up, down) in self._weights.items():
            self._table[index] = _Expert(
                ctypes.addressof(gate_up.segments), ctypes.addressof(down.segments), len(gate_up.parts),
                len(down.parts),
            )  # fmt: skip

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor | None:
        """x: bfloat16 (num_tokens, hidden). shares: float32, chosen: int64, (num_tokens, any number); others
        than `experts` are left out.

        Returns float32 (num_tokens, hidden), or None where an expert has too many tokens.
        """
        assert (x.dtype, shares.dtype, chosen.dtype) == (torch.bfloat16, torch.float32, torch.int64)
        x, shares, chosen = x.contiguous(), shares.contiguous(), chosen.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32)
        is_done = self._function(
            self._table, len(self._table), self._hidden, self._inner, x.data_ptr(), x.shape[0], chosen.data_ptr(),
            shares.data_ptr(), chosen.shape[1], self._max_rows, self._gate, out.data_ptr(),
        )  # fmt: skip
        return out if is_done else None
