"""Prompts of models with latent attention in the expanded form: K and V of all keys by one GEMM, then attention.

A (query, key) pair takes 2 x (rank + rotated + rank) operations per head in the absorbed form and 2 x (plain +
rotated + value) in this one, 2,176 and 640 for DeepSeek's 512, 64, 128 and 128. Expanding takes 2 x rank x (plain +
value) per key and head. Absorbing a query and its output takes the same, which this form saves, so a chunk's own keys
cost nothing extra. What remains is the cost of the context:

    expanded is cheaper where    pairs x (2 rank - plain - value) > context x rank x (plain + value)

For DeepSeek's numbers and n tokens after c: where n + n (n + 1) / 2c > 170.7, so for any chunk of 171 tokens, and for
64 after up to 19. All chunks of a step are decided together, so that one kernel attends for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.errors import ConfigError
from common.wings import has_wing, require_wing
from engine.gpu.pinning import upload
from engine.mla.config import LatentConfig
from engine.mla.gpu_latents import ExpandedPlan, LatentPlan, PagedLatents
from kernels.gpu.attention.prompt_tiles import prefill_tiles
from kernels.gpu.mla.expanded_prefill import TILE_M, expanded_prefill

if TYPE_CHECKING:
    from engine.prefill_backends import fa3

logger = logging.getLogger(__name__)
MAX_EXPANDED_BYTES = 512 << 20  # for one layer's latents, K and V; steps with more keys are absorbed


def is_cheaper_expanded(latent: LatentConfig, query_starts: Sequence[int], seq_lens: Sequence[int]) -> bool:
    pairs = context = 0
    for (start, stop), seq_len in zip(pairwise(query_starts), seq_lens, strict=True):
        count = stop - start
        pairs += count * (seq_len - count) + count * (count + 1) // 2
        context += seq_len - count
    expanded = latent.nope_head_dim + latent.v_head_dim
    return pairs * (2 * latent.kv_lora_rank - expanded) > context * latent.kv_lora_rank * expanded


class ExpandedLatents(PagedLatents):
    """Plans the cheaper form for each step. `prefill` computes absorbed steps, `attend` expanded ones.

    Its buffers are allocated at once, so that memory measurements include them.
    """

    def __init__(
        self, pool: Tensor, num_heads: int, latent: LatentConfig, dtype: torch.dtype,
        flash: fa3.Forward | None = None, max_bytes: int = MAX_EXPANDED_BYTES,
    ) -> None:  # fmt: skip
        """flash: FlashAttention-3's operator, for heads of these widths; None: our kernel attends."""
        super().__init__(num_heads, latent)
        self._latent, self._flash, self._block_size = latent, flash, pool.shape[4]
        self._dims = latent.nope_head_dim, latent.rope_head_dim, latent.v_head_dim
        plain, rotated, value = self._dims
        widths = [latent.kv_lora_rank + rotated, num_heads * (plain + value)]
        if flash is not None:
            self.name = "fa3"
            widths.append(num_heads * (plain + rotated))
        self._max_keys = max_bytes // (sum(widths) * dtype.itemsize)
        self._latents, self._kv, *keys = (
            torch.empty(self._max_keys, width, dtype=dtype, device=pool.device) for width in widths
        )
        self._keys = keys[0].view(self._max_keys, num_heads, -1) if keys else None

    def plan(self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor) -> LatentPlan:
        """Plan the cheaper form."""
        if sum(seq_lens) > self._max_keys or not is_cheaper_expanded(self._latent, query_starts, seq_lens):
            return super().plan(query_starts, seq_lens, block_tables)
        return self.plan_expanded(query_starts, seq_lens, block_tables)

    def plan_expanded(
        self, query_starts: Sequence[int], seq_lens: Sequence[int], block_tables: Tensor
    ) -> ExpandedPlan:
        """Plan the expanded form, cheaper or not, for at most as many keys as the buffers hold."""
        num_keys, device = sum(seq_lens), block_tables.device
        key_starts = list(accumulate(seq_lens, initial=0))
        rows = np.repeat(np.arange(len(seq_lens)), seq_lens)
        positions = np.arange(num_keys) - np.asarray(key_starts)[rows]
        index = upload(np.stack([rows, *np.divmod(positions, self._block_size)]), torch.int64, device)
        # Keys first: a pointer whose alignment depends on the number of rows would need two variants of our kernel.
        starts = upload([key_starts, list(query_starts)], torch.int32, device)
        tiles = None
        if self._flash is None:
            tiles = upload(prefill_tiles(query_starts, seq_lens, 1, TILE_M), torch.int32, device).view(-1, 4)
        longest = max(stop - start for start, stop in pairwise(query_starts))
        return ExpandedPlan(
            block_tables[index[0], index[1]].long(), index[2], starts[1], starts[0], longest, max(seq_lens), tiles
        )

    def attend(self, q: Tensor, kv_b: Tensor, pool: Tensor, layer: int, plan: ExpandedPlan, out: Tensor) -> None:
        """Attend. q: (num_tokens, num_heads, plain + rotated), rotated. out: (num_tokens, num_heads, value),
        contiguous.

        kv_b: of `LatentAttention`. The pool already holds the latents of these tokens.
        """
        num_keys, num_heads = plan.blocks.shape[0], q.shape[1]
        plain = self._dims[0]
        latents, source = self._latents[:num_keys], pool[:, layer, 0, 0]
        if pool.dtype == latents.dtype:  # without a copy of them
            torch.ops.aten.index.Tensor_out(source, [plan.blocks, plan.offsets], out=latents)
        else:
            latents.copy_(source[plan.blocks, plan.offsets])
        kv = torch.mm(latents[:, : self.rank], kv_b.t(), out=self._kv[:num_keys]).view(num_keys, num_heads, -1)
        rotated = latents[:, self.rank :]
        if self._flash is None:
            assert plan.tiles is not None
            expanded_prefill(q, kv, rotated, self.scale, plan.key_starts, plan.tiles, out)
            return
        assert self._keys is not None
        k = self._keys[:num_keys]
        k[..., :plain] = kv[..., :plain]
        k[..., plain:] = rotated[:, None]
        v = kv[..., plain:]
        if plan.key_starts.shape[0] == 2:  # a single row is faster as a batch of one, see `fa3`
            self._flash(
                q[None], k[None], v[None], out=out[None], cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                max_seqlen_k=None, softmax_scale=self.scale, is_causal=True, num_splits=0,
            )  # fmt: skip
            return
        self._flash(
            q, k, v, out=out, cu_seqlens_q=plan.query_starts, cu_seqlens_k=plan.key_starts,
            max_seqlen_q=plan.max_queries, max_seqlen_k=plan.max_keys, softmax_scale=self.scale, is_causal=True,
            num_splits=0,
        )  # fmt: skip


def open_latents(wanted: str, pool: Tensor, num_heads: int, latent: LatentConfig, dtype: torch.dtype) -> PagedLatents:
    """Return the prefill attention over a pool of latents. Raises ConfigError.

    `auto` takes FlashAttention-3 if a trial shows that the package has kernels of these widths, else our kernel.
    """
    if wanted == "cudnn":
        raise ConfigError("--attention-backend cudnn does not take latent attention; use triton")
    dims = latent.nope_head_dim, latent.rope_head_dim, latent.v_head_dim
    if any(dim < 16 or dim & (dim - 1) for dim in dims):
        logger.info("prefill attention: absorbed latents alone, as heads of %s are no powers of two", dims)
        return PagedLatents(num_heads, latent)
    if wanted == "fa3":
        require_wing("engine.prefill_backends", "--attention-backend fa3")
    has_libraries = wanted != "triton" and has_wing("engine.prefill_backends")
    flash = open_flash(wanted, dims, dtype, pool.device) if has_libraries else None
    backend = ExpandedLatents(pool, num_heads, latent, dtype, flash)
    logger.info("prefill attention: %s, over expanded latents where that is cheaper", backend.name)
    return backend


def open_flash(
    wanted: str, dims: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> fa3.Forward | None:
    """Return FlashAttention-3's operator if a trial succeeds: a package does not tell its supported widths."""
    from engine.prefill_backends import fa3

    fits = device.type == "cuda" and torch.version.hip is None and dtype == torch.bfloat16
    if not fits or torch.cuda.get_device_capability(device) != (9, 0) or not fa3.installed_package():
        if wanted == "fa3":
            raise ConfigError(
                "--attention-backend fa3 takes latents on a GPU of compute capability 9.0, in bfloat16, where it is "
                "installed; use triton"
            )
        return None
    try:
        forward = fa3.load().forward
        try_widths(forward, dims, dtype, device)
    except torch.OutOfMemoryError:
        raise  # a RuntimeError that another backend does not solve
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or not for these widths
        if wanted == "fa3":
            raise ConfigError(f"--attention-backend fa3 does not work here: {error}") from error
        logger.info("FlashAttention-3 does not take latents here: %s", error)
        return None
    return forward


def try_widths(forward: fa3.Forward, dims: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Attend for a small row. Raises RuntimeError if that fails or the result is wrong."""
    plain, rotated, value = dims
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(3, 40, 2, plain + max(rotated, value), generator=generator, device=device).to(dtype)
    q, k, v = numbers[0, ..., : plain + rotated], numbers[1, ..., : plain + rotated], numbers[2, ..., :value]
    out = torch.zeros(v.shape, dtype=dtype, device=device)
    starts = torch.tensor([0, 40], dtype=torch.int32, device=device)
    forward(
        q, k, v, out=out, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=40, max_seqlen_k=40,
        softmax_scale=1 / math.sqrt(plain + rotated), is_causal=True, num_splits=0,
    )  # fmt: skip
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    if not bool((out.float() - wanted).norm() < 0.02 * wanted.norm()):
        raise RuntimeError(f"it gives wrong numbers for heads of {plain + rotated} and {value}")
