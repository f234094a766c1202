"""Latent attention on a GPU, see `engine/gpu/ops`: separate GEMMs, with `LatentQueries` between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from engine.few_rows.one_row import ONE_ROW, bound_gemv, is_plain_row, nothing_pending
from engine.gpu.ops.plain import gemm
from engine.gpu.ops.rules import GpuOp, GpuStep, Rule, Target
from engine.layers.forward import Op
from engine.layers.linear import LinearLayer
from engine.mla.gpu_attention import LatentQueries
from engine.mla.latent_attention import LATENT_NORM_EPS, LatentAttention
from kernels.gpu.elementwise.rms_norm import rms_norm

attention = LatentQueries


def prepare(block: LatentAttention) -> None:
    """Do nothing: ops read the weights as they are."""


def plain(block: LatentAttention, target: Target) -> GpuOp:
    num_rows, workspace = target.num_rows, target.workspace
    output = gemm(block.output, num_rows, workspace)
    normed_q_b = None
    if block.q_b is not None:
        assert block.q_norm is not None
        q_b, norm = gemm(block.q_b, num_rows, workspace), block.q_norm
        normed_q_b = lambda q: q_b(rms_norm(q, norm, LATENT_NORM_EPS))  # noqa: E731
    attend = latent_attention(block, gemm(block.qkv_a, num_rows, workspace), normed_q_b)
    return Op(target.seams.fold(block.norm, block.eps), lambda x, step: output(attend(x, step)))


def one_row(block: LatentAttention, target: Target) -> GpuOp:
    qkv_a, output = bound_gemv(block.qkv_a), bound_gemv(block.output)
    q_b = None if block.q_b is None else bound_gemv(block.q_b)
    attend = latent_attention(
        block,
        partial(qkv_a, norm=block.norm, eps=block.eps),
        None if q_b is None else partial(q_b, norm=block.q_norm, eps=LATENT_NORM_EPS),
    )

    def body(residual: Tensor, step: GpuStep) -> None:
        output(attend(residual, step), added_to=residual)

    return Op(nothing_pending, body)


def latent_attention(
    block: LatentAttention, qkv_a: LinearLayer, normed_q_b: LinearLayer | None
) -> Callable[[Tensor, GpuStep], Tensor]:
    """Return the block up to its output projection, with these linear layers. normed_q_b: norm and GEMM."""
    kept = block.rank + block.rope_dim

    def attend(x: Tensor, step: GpuStep) -> Tensor:
        y = qkv_a(x)
        q, latents = y[:, :-kept], y[:, -kept:]
        if normed_q_b is not None:
            q = normed_q_b(q)
        return step.attend(block, q.view(-1, block.num_heads, block.qk_dim), latents)

    return attend


RULES = Rule(LatentAttention, one_row, is_plain_row, ONE_ROW), Rule(LatentAttention, plain)
