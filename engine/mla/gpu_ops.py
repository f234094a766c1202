"""Latent attention on a GPU: GEMMs apart; what is between them, in the absorbed form, is `FusedForward`'s."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.gpu.ops.form import GpuStep
from engine.mla.latent_attention import LatentAttention

Gemm = Callable[[Tensor], Tensor]


def latent_attention(
    block: LatentAttention, qkv_a: Gemm, normed_q_b: Gemm | None
) -> Callable[[Tensor, GpuStep], Tensor]:
    """The block up to its output projection, with linear layers in the forms given. normed_q_b: norm and GEMM."""
    kept = block.rank + block.rope_dim

    def attend(x: Tensor, step: GpuStep) -> Tensor:
        y = qkv_a(x)
        q, latents = y[:, :-kept], y[:, -kept:]
        if normed_q_b is not None:
            q = normed_q_b(q)
        return step.attend_latents(block, q.view(-1, block.num_heads, block.qk_dim), latents)

    return attend
