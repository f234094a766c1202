"""Tuned settings of GEMMs of few rows, like `kernels/gpu/tuning.py` for other kernels."""

from __future__ import annotations

from kernels.gpu.few_rows.gemm_configs import GemmTable, GemvConfig, PreloadedConfig, TileConfig
from kernels.gpu.tuning import Rule, above, at_most, between

# One row of 16 bits, `gemv`. Against cuBLAS, shapes of Qwen2.5-7B and Qwen3-0.6B: 1.10 to 1.4 times as fast, 1.9
# and 3.9 where n is 1024. FUSED: with a norm, a gate or the residual, which are nearly free where W is large
# (Qwen2.5-7B gate_up: 63.5 us with, 62.6 without; other settings up to 75). Wide weights without any of these are
# faster with `skinny_gemm`: at two ranks qkv, o and down of Qwen2.5-7B take 9.9, 6.7, 25.2 us with FUSED, 8.5, 5.6,
# 19.8 with the tiles of 8 rows, 8.7, 6.4, 21.3 in cuBLAS.
# tiles: qkv and o of gpt-oss-20b, whose step they make 2.8 and 3.2 us a layer faster; of Qwen2.5-7B 1.6 us together.
FUSED_GEMV = GemmTable(
    Rule(GemvConfig(4, 512, num_warps=2, num_stages=3), tiles=between(300, 512)),
    Rule(GemvConfig(4, 256, num_warps=2, num_stages=5)),
)
GEMV = GemmTable(Rule(GemvConfig(2, 512, num_warps=2, num_stages=1), n_per_k=above(1)))

# Rows of 16 bits, `skinny_gemm`. 8 and 32 rows are 1.02 to 1.4 times as fast as with cuBLAS, which is 10 to 15%
# faster at 64, except where tiles just fill the multiprocessors: down of Qwen2.5-7B at two ranks 23.1 and 24.2 us
# with two splits, o and down of Llama-3.3-70B at two ranks 18.9 and 20.5, 58.3 and 62.3. Each of 4 splits costs less
# than idle multiprocessors.
SKINNY = GemmTable(
    Rule(TileConfig(64, 128, 2, num_stages=4), rows=between(32, 64), n=between(3519, 4224), k=between(8191, 12288)),
    Rule(TileConfig(64, 128, 1, num_stages=4), rows=between(32, 64), n=between(8063, 8448), k=between(4095, 14336)),
    Rule(TileConfig(64, 128, 4, num_stages=4), rows=at_most(32), n=at_most(2111)),
    Rule(TileConfig(64, 128, 1, num_stages=6), rows=at_most(32), n=above(8255)),
    Rule(TileConfig(64, 128, 1, num_stages=6), rows=at_most(32), k=at_most(4096)),
    Rule(TileConfig(64, 128, 2, num_stages=6), rows=at_most(32)),
)

# Gate and up of 16 bits in one GEMM; n is the columns of each. A whole step of Qwen2.5-7B: 4,233 -> 4,210 us at 8
# rows, 4,497 -> 4,472 at 16, 5,418 -> 5,186 at 64; at 32 4,879 -> 4,992, against `skinny_gemm`, so not there.
# Qwen2.5-7B, n 18,944, hidden 3584, this against cuBLAS and `silu_mul`: 70.3 and 74.6 us at 8 rows, 71.3 and 76.3
# at 32, 73.1 and 77.0 at 64, 94 and 79 at 128. With too few tiles for all multiprocessors nothing is gained. At 64
# rows Qwen3-8B, n 12,288, takes 55.4 and 54.3, Llama-3.1-8B, n 14,336, 80.4 and 64.9 us. Whole steps of the latter
# are faster with this one all the same: 5,985 and 6,067 us at 40 rows, 6,570 and 6,686 at 64. Two ranks: Qwen2.5-7B,
# n 9472, 44.9 and 38.1 us at 64 rows; Llama-3.3-70B, n 14,336, hidden 8192, 114 and 118, 161 with steps of 64. One
# row goes through `gemv`, gate and all: 41.7 us with this one, W alone 31.9.
SKINNY_GATED = GemmTable(
    Rule(TileConfig(64, 128, num_stages=4), rows=between(1, 16), n=above(8191)),
    Rule(TileConfig(64, 128, num_stages=4), rows=between(32, 64), n=above(12287), k=above(8191)),
    Rule(TileConfig(64, 64, num_stages=3), rows=between(32, 64), n=above(12287)),
)

# 16-bit weights that are on the chip before the GEMM starts, `preloaded_gemm`. In whole steps of Qwen3-0.6B. Tiles of
# 512 columns take 64 KB and up to 64 KB more for x; two programs fit a multiprocessor when x comes in halves, which
# costs a microsecond, so only where one to each is not enough (64 rows 2,761 -> 2,661 us). Up to 32 rows, whose x is
# small, two tiles in one program leave nothing to add up (32 rows 1,780 -> 1,741 us). With more programs than fit,
# Qwen3-1.7B at 1, 8, 32 and 64 rows: 1,516 -> 1,372, 1,684 -> 1,694, 2,614 -> 2,542, 3,502 -> 4,217 us: 264 are two
# to each multiprocessor.
PRELOADED = GemmTable(
    Rule(PreloadedConfig(512, 2, 2), rows=at_most(32), k=between(512, 1024), tiles=at_most(1024)),
    Rule(PreloadedConfig(512), rows=at_most(32), tiles=at_most(1024)),
    Rule(PreloadedConfig(256, 2), rows=at_most(64), k=above(256), tiles=between(132, 264)),
    Rule(PreloadedConfig(512), rows=at_most(64), tiles=at_most(264)),
)

# With more rows, attention after such a GEMM starts late, so that its programs spread evenly; up to this many, an
# early start hides more time than that gains (docs/decisions/kernel-launches-and-cuda-graphs.md).
SPREAD_ROWS = 32

# Weights of up to this size are prefetched before the wait: a whole step of Qwen3-0.6B is 3% faster at 1 and 8 rows,
# of Qwen2.5-7B 2% slower.
MAX_PREFETCHED_WEIGHTS = 1 << 23
