"""Latent attention on a GPU: GEMMs apart; what is between them, in the absorbed form, is `FusedForward`'s."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.gpu.ops.form import GpuBody, GpuStep
from engine.layers.latent_attention import LATENT_NORM_EPS, LatentAttention
from kernels.gpu.rms_norm import rms_norm

Gemm = Callable[[Tensor], Tensor]


def latent_attention(block: LatentAttention, qkv_a: Gemm, q_b: Gemm | None, output: Gemm) -> GpuBody:
    """The block with its linear layers in the forms given."""
    kept = block.rank + block.rope_dim

    def body(x: Tensor, step: GpuStep) -> Tensor:
        y = qkv_a(x)
        q, latents = y[:, :-kept], y[:, -kept:]
        if q_b is not None:
            assert block.q_norm is not None
            q = q_b(rms_norm(q, block.q_norm, LATENT_NORM_EPS))
        return output(step.attend_latents(block, q.view(-1, block.num_heads, block.qk_dim), latents))

    return body
