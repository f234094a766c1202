"""Tuned settings of GEMMs of quantized weights, like `kernels/gpu/tuning.py` for other kernels."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu.few_rows.gemm_configs import GemmTable, TileConfig
from kernels.gpu.tuning import Rule, Table, above, at_most, between


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """programs_per_sm: programs per multiprocessor, which share the steps of all tiles. num_warps: consumer warps.
    max_registers: the mean per thread of a program.
    """

    programs_per_sm: int
    num_warps: int
    max_registers: int


@dataclass(frozen=True, slots=True)
class SlicedKConfig:
    """block_n: columns per program, with a gate as many of each half. num_warps: slices of block_k in a step. ahead:
    steps whose W is loaded before the wait for the previous kernel. prefetched: lines of a row of W to prefetch then.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    ahead: int = 0
    prefetched: int = 0


# Quantized rows (of planes) with 8-bit weights, `sliced_k_gemm`; beyond, `skinny_gemm` takes them. Whole steps of
# Qwen2.5-7B in fp8, us: one row 2,553 with tiles alone and 2,231 with these, 8 rows 2,726 and 2,471. At 16 rows
# gate and up are faster apart (2,849 and 2,886). In the last rule nearly all of a program's W is in flight before
# the wait; 8192 columns are too many to hold.
SLICED_K = GemmTable(
    Rule(SlicedKConfig(16, 128), rows=at_most(16), n_per_k=above(2)),
    Rule(SlicedKConfig(16, 128, num_stages=8, ahead=2), rows=at_most(16), k=above(8192)),
    Rule(SlicedKConfig(16, 128, num_stages=3, ahead=6), rows=at_most(16)),
)
SLICED_K_GATED = GemmTable(Rule(SlicedKConfig(16, 128, num_warps=2, num_stages=5, ahead=1), rows=at_most(8)))

# Quantized rows (of planes) with 8-bit weights, `skinny_gemm`. Torch's e4m3 GEMM takes over where it is faster:
# Qwen2.5-7B's gate_up at 64 rows: ours 45 us; at 256: ours 84, torch's 58. Llama-3.3-70B at two ranks, 64 rows: qkv
# 19.4 us with two splits and 16.2 without, down 34.9 and 31.5.
SKINNY_8_BIT = GemmTable(
    Rule(TileConfig(64, 128, 1, num_stages=6), rows=at_most(64), n=above(8192)),
    Rule(TileConfig(64, 256, 1), rows=at_most(64), n=above(5119)),
    Rule(TileConfig(64, 256, 1), rows=at_most(64), k=at_most(4096), n_per_k=above(1)),
    Rule(TileConfig(64, 256, 2), rows=at_most(64)),
    Rule(TileConfig(64, 128, 1), rows=at_most(512)),
    Rule(TileConfig(64, 128, 1), outputs=at_most((1 << 24) - 1)),
    Rule(TileConfig(256, 128, 1, num_warps=8, num_stages=3)),
)
MAX_FP8_ROWS = 192
MAX_TWO_PLANE_ROWS = 256  # int8 weights and rows of 16 bits; with more, writing the weight out for cuBLAS is faster

# Packed weights and few rows of bfloat16, `packed_rows_gemm`. bits: of a weight. pair: columns of a pair of scales.
# Qwen2.5-7B's qkv, o, gate_up, down at one row, us: 2 bits 12.4, 11.2, 45, 47 (with tiles 21, 20.5, 96, 67); 3 bits
# 10.5, 9.7, 36.5, 29.9 (13.4, 13.2, 58, 43); 5 bits gate_up 46 (59); 6 bits 11.8, 9.9, 48, 34 (15.2, 11.5, 72, 41); 4
# bits in groups of 32 9.2, 7.3, 30.5, 26, of 128 6.7, 6.4, 23, 21. What no rule has is faster with the next tables.
PACKED_ROWS = Table(
    Rule(SlicedKConfig(32, 128, 4, 3), bits=at_most(2), rows=at_most(1), n_per_k=above(2)),
    Rule(SlicedKConfig(16, 128, 8, 3, ahead=2), bits=at_most(2), rows=at_most(1), k=above(8192)),
    Rule(SlicedKConfig(32, 128, 4, 3, ahead=2), bits=at_most(2), rows=at_most(1)),
    Rule(SlicedKConfig(64, 128, 4, 3), bits=at_most(2), rows=at_most(8), n_per_k=above(2)),
    Rule(SlicedKConfig(32, 128, 2, 3), bits=at_most(2), rows=at_most(8), k=at_most(8192)),
    Rule(SlicedKConfig(32, 128, 2, 3), bits=at_most(3), rows=at_most(8), n_per_k=above(2)),
    Rule(SlicedKConfig(16, 128, 4, 3, ahead=4), bits=between(2, 3), rows=at_most(1)),
    Rule(SlicedKConfig(32, 128, 4, 3), bits=between(3, 4), rows=at_most(1), n_per_k=above(2)),
    Rule(SlicedKConfig(16, 128, 8, 3, ahead=2), bits=between(3, 4), pair=at_most(32), rows=at_most(1), k=above(8192)),
    Rule(SlicedKConfig(16, 128, 16, 3, ahead=1), bits=between(3, 4), rows=at_most(1), k=above(8192)),
    Rule(
        SlicedKConfig(16, 128, 8, 3, ahead=2), bits=between(3, 4), pair=at_most(32), rows=at_most(1),
        n_per_k=at_most(1),
    ),
    Rule(SlicedKConfig(16, 128, 4, 3, ahead=4), bits=between(3, 4), rows=at_most(1)),
    Rule(SlicedKConfig(64, 128, 4, 3), bits=between(3, 4), rows=at_most(8), n_per_k=above(2)),
    Rule(SlicedKConfig(64, 128, 4, 3), bits=between(3, 4), pair=at_most(32), rows=at_most(16), n_per_k=above(2)),
    Rule(
        SlicedKConfig(16, 128, 4, 3, ahead=4), bits=between(3, 4), pair=at_most(32), rows=at_most(8), k=at_most(8192),
        n_per_k=at_most(1),
    ),
    Rule(SlicedKConfig(32, 128, 2, 3), bits=between(4, 5), rows=at_most(1), n_per_k=above(2)),
    Rule(
        SlicedKConfig(16, 128, 4, 3, ahead=2), bits=between(4, 5), rows=at_most(1), k=at_most(8192),
        n_per_k=at_most(1),
    ),
    Rule(SlicedKConfig(16, 128, 2, 3), bits=above(5), rows=at_most(1), n_per_k=above(2)),
    Rule(SlicedKConfig(16, 128, 4, 3, ahead=4), bits=above(5), rows=at_most(1), n_per_k=above(1)),
    Rule(SlicedKConfig(16, 128, 8, 3, ahead=2), bits=above(5), rows=at_most(1)),
    Rule(SlicedKConfig(32, 128, 2, 3), bits=above(5), rows=at_most(8), n_per_k=above(2)),
)  # fmt: skip

# Packed weights and up to 128 bfloat16 rows on Hopper, `packed_stream`. Qwen2.5-7B's qkv, o, gate_up, down, us: 4
# bits in groups of 128 at 16 rows 8.8, 7.4, 30.9, 20.9 (with tiles 10.2, 9.1, 43, 24.2), at 64 15.1, 11.9, 49, 29.7
# (17.8, 13.5, 60, 41), at 128 22.6, 18.3, 67, 41 (26, 20.7, 96, 58); in groups of 32 at 64 16, 12.7, 53.5, 35 (20,
# 14.9, 86, 48). gate_up of 2, 3, 5, 6 bits at 64 rows 71, 58, 64, 69 (172, 151, 110, 157). One program a
# multiprocessor with 4 warps is slower.
MAX_PACKED_ROWS = 4  # of `packed_rows_gemm` then: at 8 rows of 4 bits 9.0, 8.4, 34.6, 23.7; 8.6, 7.4, 31.6, 20.7
PACKED_STREAMS = Table(
    Rule(StreamConfig(2, num_warps=4, max_registers=128), rows=at_most(16)),
    Rule(StreamConfig(2, num_warps=4, max_registers=128), rows=at_most(64), n=above(16896)),
    Rule(StreamConfig(1, num_warps=8, max_registers=168)),
)

# The same on other GPUs, and more rows, `packed_gemm`; set by an H200. Its gate_up and down at 256 rows take 153 and
# 98 us, written out for cuBLAS 244 and 120; qkv and o are faster written out, 26.6 and 21.8. Splits are as many as
# their workspace holds.
PACKED_TILES = GemmTable(
    Rule(TileConfig(64, 128, 1, num_stages=5), rows=at_most(32), n_per_k=above(2)),
    Rule(TileConfig(64, 128, 8, num_stages=5), rows=at_most(32), n=at_most(16384)),
    Rule(TileConfig(64, 128, 4, num_stages=5), rows=at_most(32), n=at_most(32768)),
    Rule(TileConfig(128, 128, 1, num_warps=8, num_stages=3), rows=at_most(256), n_per_k=above(2)),
    Rule(TileConfig(128, 128, 4, num_warps=8, num_stages=3), rows=at_most(128), n=at_most(8192)),
    Rule(TileConfig(128, 128, 1, num_warps=8, num_stages=3), rows=at_most(128)),
    Rule(TileConfig(128, 128, 2, num_warps=8, num_stages=3), rows=at_most(256), k=above(8192), n=at_most(8192)),
)
