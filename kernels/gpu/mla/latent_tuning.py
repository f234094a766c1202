"""Tuned settings of attention over latents, like `kernels/gpu/tuning.py` for other kernels."""

from __future__ import annotations

from kernels.gpu.tuning import DecodeConfig, PrefillConfig

# `latent_decode` and `latent_prefill`: keys of 576 numbers, of 16 heads or more. us at 64 x 4k | 8 x 8k | 256 x 1k:
# this 87.8 | 32.0 | 84.9; (64, 4, 2, 2) 94.0 | 36.7 | 89.0. (64, 8, 3, 1) takes 89.7 and 31.2 at the first two.
# With keys instead of heads as rows of the GEMMs, 98 at 64 x 4k, through tensor descriptors 99.
LATENT_DECODE = DecodeConfig(32, num_warps=4, num_stages=3, programs_per_sm=2)
LATENT_PREFILL = PrefillConfig(32, 8, 2)
LATENT_DECODE_FOUR_BYTES = DecodeConfig(16, num_warps=4, num_stages=2, programs_per_sm=2)
LATENT_PREFILL_FOUR_BYTES = PrefillConfig(16, 8, 1)
# For keys of 192 numbers and values of 128; not swept yet.
EXPANDED_PREFILL = PrefillConfig(64, 8, 2)
EXPANDED_PREFILL_FOUR_BYTES = PrefillConfig(32, 8, 1)
