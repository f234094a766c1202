"""Kernels with a program per row or tile, computed by torch at once: interpreted, they took a third of the time.

tests/kernels interprets the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, starmap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.paged_attention import write_kv
from kernels.quantization.w4a16_gemm import dequantize_w4


class Launched:
    """Replaces a kernel: takes its grid and arguments."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compute


def _normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = rows.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, n: int, stride: int, eps: float, **options: Any
) -> None:
    rows = x.as_strided((out.numel() // n, n), (stride, 1))
    if options["HAS_RESIDUAL"]:
        assert residual is not None
        residual.view(-1, n).copy_(rows.float() + residual.view(-1, n).float())
        rows = residual.view(-1, n)
    out.view(-1, n).copy_(_normed(rows, weight, eps))


def _embed_norm(
    ids: Tensor, embedding: Tensor, weight: Tensor, residual: Tensor, out: Tensor, n: int, eps: float, **_: Any
) -> None:
    residual.copy_(embedding[ids.long()])
    out.copy_(_normed(residual, weight, eps))


def _add_rms_norm_of_partials(
    partials: Tensor, residual: Tensor, weight: Tensor, out: Tensor, n: int, stride: int, eps: float, **options: Any
) -> None:
    parts = partials.as_strided((options["NUM_SPLITS"], *residual.shape), (stride, n, 1))
    residual.copy_(residual.float() + parts.float().sum(0))
    out.copy_(_normed(residual, weight, eps))


def _post_norm(
    x: Tensor, residual: Tensor, post: Tensor, weight: Tensor, out: Tensor, n: int, stride: int, eps: float, **_: Any
) -> None:
    residual.copy_(residual.float() + _normed(x.as_strided(residual.shape, (stride, 1)), post, eps))
    out.copy_(_normed(residual, weight, eps))


def _silu_mul(gate_up: Tensor, out: Tensor, n: int, **options: Any) -> None:
    gate, up = gate_up.view(-1, 2, n).float().unbind(1)
    out.copy_((gelu(gate, approximate="tanh") if options["IS_GELU"] else silu(gate)) * up)


def _rope(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, norm: Tensor, pool: Tensor, n: int, layer: int,
    token_stride: int, block_stride: int, layer_stride: int, eps: float, **options: Any,
) -> None:  # fmt: skip
    num_kv, block_size = options["NUM_KV_HEADS"], options["BLOCK_SIZE"]
    partials = qkv.view(-1, *qkv.shape[-3:])
    x = partials.float().sum(0)
    qk = x[:, : options["NUM_HEADS"] + num_kv]
    if options["HAS_NORM"]:
        qk.copy_(_normed(qk, norm, eps))
    cos, sin = table[positions[:n].long(), :, None].float().unbind(1)
    qk.copy_(qk * cos + qk.roll(options["HEAD_DIM"] // 2, -1) * sin)
    partials[0, :, : qk.shape[1]] = qk
    is_stored = slots[:n] >= 0
    stored, kv = slots[:n][is_stored].long(), x[is_stored, -2 * num_kv :].unflatten(1, (2, num_kv))
    kv = kv if pool.dtype == torch.float8_e4m3fn else kv.to(pool.dtype)  # 8-bit numbers are clamped first
    write_kv(pool, layer, kv, stored // block_size, stored % block_size)


def _rows_of_slots(rows: Tensor, slots: Tensor, ranks: Tensor) -> Iterator[tuple[int, Tensor, list[int]]]:
    """Yield the slot, the rows and the ranks by module of each tile that has an adapter."""
    for slot, tile in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            yield slot, tile[tile >= 0].long(), ranks[slot].tolist()


def _shrink(
    x: Tensor, a: Tensor, ranks: Tensor, rows: Tensor, slots: Tensor, h: Tensor, *sizes: int, **options: Any
) -> None:
    h[1:] = 0
    for slot, own, of_modules in _rows_of_slots(rows, slots, ranks):
        for module, rank in enumerate(of_modules):
            h[0, own, module, :rank] = x[own].float() @ a[slot, module, :rank].float().T


def _expand(
    h: Tensor, b: Tensor, ranks: Tensor, rows: Tensor, slots: Tensor, y: Tensor, n: int, second: int, third: int,
    *sizes: int, **options: Any,
) -> None:  # fmt: skip
    starts = [*(0, second, third)[: ranks.shape[1]], n]
    for slot, own, of_modules in _rows_of_slots(rows, slots, ranks):
        for module, (rank, columns) in enumerate(zip(of_modules, starmap(slice, pairwise(starts)), strict=True)):
            shrunk = h[:, own, module, :rank].sum(0).to(b.dtype).float()
            y[own, columns] = (y[own, columns].float() + shrunk @ b[slot, :rank, columns].float()).to(y.dtype)


def compute_rows_at_once(patch: pytest.MonkeyPatch) -> None:
    elementwise = "kernels.gpu.elementwise"
    patch.setattr(f"{elementwise}.rms_norm._rms_norm_kernel", Launched(_rms_norm))
    patch.setattr(f"{elementwise}.rms_norm._embed_norm_kernel", Launched(_embed_norm))
    patch.setattr(f"{elementwise}.rope._rope_kernel", Launched(_rope))
    patch.setattr(f"{elementwise}.silu_mul._silu_mul_kernel", Launched(_silu_mul))
    patch.setattr(
        "kernels.gpu.few_rows.partials._add_rms_norm_of_partials_kernel", Launched(_add_rms_norm_of_partials)
    )
    patch.setattr("kernels.gpu.lora.low_rank.shrink_few_kernel", Launched(_shrink))
    patch.setattr("kernels.gpu.lora.low_rank.expand_few_kernel", Launched(_expand))
    patch.setattr("kernels.gpu.post_norms.post_norm._post_norm_kernel", Launched(_post_norm))
    patch.setattr("kernels.gpu.quantization.packed_linear.dequantize", dequantize_w4)
