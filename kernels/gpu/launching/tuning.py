"""Settings of the kernels by what they are launched for: tables of rules, and nothing else.

Chips and models are named here alone. All was measured on an H200, where nothing else is said in whole captured
steps; on other chips the settings work, untuned. A kernel file knows what its config means; the engine asks the
table. New rules come from `benchmarks/kernels/bench_*.py --sweep`.
"""

from __future__ import annotations

from kernels.gpu.launching.launch_configs import (
    DecodeConfig,
    ExpertTile,
    GemmTable,
    GemvConfig,
    PrefillConfig,
    PreloadedConfig,
    RopeConfig,
    Rule,
    SlicedKConfig,
    StreamConfig,
    Table,
    TileConfig,
    above,
    at_most,
    between,
)

# One row of 16 bits, `gemv`. Against cuBLAS, shapes of Qwen2.5-7B and Qwen3-0.6B: 1.10 to 1.4 times as fast, 1.9
# and 3.9 where n is 1024. FUSED: with a norm, a gate or the residual, which are nearly free where W is large
# (Qwen2.5-7B gate_up: 63.5 us with, 62.6 without; other settings up to 75). Wide weights without any of these are
# faster with `skinny_gemm`: at two ranks qkv, o and down of Qwen2.5-7B take 9.9, 6.7, 25.2 us with FUSED, 8.5, 5.6,
# 19.8 with the tiles of 8 rows, 8.7, 6.4, 21.3 in cuBLAS.
FUSED_GEMV = GemvConfig(4, 256, num_warps=2, num_stages=5)
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

# With more rows, attention after such a GEMM starts late, so that its programs spread evenly; up to these an early
# start hides more than that gains (docs/decisions/kernel-launches-and-cuda-graphs.md).
SPREAD_ROWS = 32

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

# `paged_decode`; programs: rows * KV heads, group: query heads of each, itemsize: bytes of a number in K and V.
# Heads wider than 128, not measured yet: half the keys a step, so that as many programs fit a multiprocessor as of
# 128, and what keeps its registers (`python -m pytest tests/compile -k kv_groups`). The
# fastest, or within 1% of it, at 1k and 32k of context (docs/decisions/attention-kernels.md), where the rotation
# before lets these programs start late, so that they spread. Step in us of Qwen3-0.6B at 8 | 32 | 64 rows, which does
# without that up to 16 rows: FEW_HEADS 941 | 1746 | 2861, LONG_TILES 1006 | 1939 | 2773, SHORT_TILES 999 | 2216 |
# 2710. Of Qwen2.5-7B at 8 | 32 | 64 | 128: 4118 | 4637 | 5278 | 6771, LONG_TILES 4089 | 4627 | 5197 | 6611,
# SHORT_TILES 4093 | 4862 | 5517 | 6586. More programs than two to a multiprocessor come in two rounds with FEW_HEADS:
# Qwen3-0.6B at 40 | 48 rows 2352 | 2452, LONG_TILES 1968 | 2198. By the kernel's own benchmark: 256 rows, Qwen2.5-7B
# and Qwen3-0.6B, MANY_PROGRAMS 128 and 247 us, SHORT_TILES 133 and 255. 8-bit K and V of Qwen2.5-7B, 1 x 32k | 8 x 1k
# | 64 x 1k | 256 x 1k: ONE_BYTE 16.0 | 8.7 | 25.5 | 76, ONE_BYTE_MANY_ROWS 21.1 | 10.7 | 30.5 | 71.
# Uneven rows want more programs than fit at once: 256 of Azure's trace, Qwen2.5-7B, 172 us with 4 programs of
# MANY_PROGRAMS a multiprocessor and 164 with 8; of 1k each 144 and 131. Steps in ms, SHORT_TILES -> WHOLE_ROWS:
# Qwen3-0.6B at 40 | 64 | 96 rows of 1k 2.00 -> 2.02 | 2.65 -> 2.59 | 3.83 -> 4.03, at 64 | 96 of Azure's trace 3.06
# -> 3.07 | 4.28 -> 4.44; Qwen2.5-7B at 96 | 128 | 200 of 1k 6.17 -> 6.12 | 6.59 -> 6.54 | 8.26 -> 8.48, at 78 | 128 |
# 200 of the trace 6.04 -> 6.07 | 6.92 -> 6.89 | 8.64 -> 8.73.
LONG_TILES = DecodeConfig(32, 2, 7, 2)
FEW_HEADS = DecodeConfig(64, 4, 4, 2, lists_blocks=True)  # two programs fill a multiprocessor: they spread evenly
SHORT_TILES = DecodeConfig(16, 1, 6, 8)  # one warp needs no barriers; many programs fit side by side
WHOLE_ROWS = DecodeConfig(16, 1, 6, 4)  # equal rows fill the GPU with a program for each and are not split
MANY_PROGRAMS = DecodeConfig(32, 1, 4, 8)
FOUR_BYTES = DecodeConfig(32, 2, 4, 2)
ONE_BYTE = DecodeConfig(64, 4, 5, 4)
ONE_BYTE_MANY_ROWS = DecodeConfig(64, 1, 4, 8)
WIDE_HEADS = DecodeConfig(32, 4, 4, 2, lists_blocks=True)
WIDE_ONE_BYTE_MANY_ROWS = DecodeConfig(64, 2, 4, 8)
DECODE = Table(
    Rule(FOUR_BYTES, itemsize=above(2)),
    Rule(ONE_BYTE, itemsize=at_most(1), programs=at_most(511)),
    Rule(WIDE_ONE_BYTE_MANY_ROWS, itemsize=at_most(1), head_dim=above(128)),
    Rule(ONE_BYTE_MANY_ROWS, itemsize=at_most(1)),
    Rule(WIDE_HEADS, head_dim=above(128), programs=at_most(511)),
    Rule(SHORT_TILES, head_dim=above(128)),
    Rule(FEW_HEADS, group=at_most(4), programs=at_most(264)),
    Rule(LONG_TILES, programs=at_most(264)),
    Rule(WHOLE_ROWS, programs=between(384, 528)),
    Rule(SHORT_TILES, programs=at_most(1023)),
    Rule(MANY_PROGRAMS),
)
# Keys that a decode program asks for while the previous kernel still runs, and up to how many rows; more take
# bandwidth from that kernel. A step of Qwen3-0.6B at 4 | 8 | 32 rows without: 1021 | 1173 | 1913 us, with 32 keys
# 986 | 1149 | 1895, with all of 1k 1000 | 1183 | 2043.
PREFETCHED_KEYS, MAX_PREFETCH_ROWS = 32, 32

# `paged_prefill`, by rows of a tile. TFLOP/s with pages of 64, Qwen2.5-7B at 2k | 8k | 2k over 16k, Qwen3-0.6B at
# 2k | 8k. Through a descriptor: tiles of 128 x 64, 4 warps, 2 stages 372 | 487 | 450, 264 | 497; 64 x 64, 4, 2 373
# | 454 | 381, 376 | 433; two blocks a step, 128 x 128, 8, 2 358 | 482 | 403, 364 | 454; 3 stages are slower.
# Through pointers: 128 x 128, 8, 2 320 | 435 | 370, 319 | 412; 64 x 64, 4, 3 334 | 407 | 338, 352 | 407.
# Heads wider than 128, not measured yet, need 8 warps to keep their sums in registers: with 4 2,256 bytes a thread
# are outside of them at 128 rows, with 8 72.
PREFILL_BY_DESCRIPTOR = {128: PrefillConfig(64, 4, 2), 64: PrefillConfig(64, 4, 2)}
PREFILL_BY_POINTERS = {128: PrefillConfig(128, 8, 2), 64: PrefillConfig(64, 4, 3)}
PREFILL_WIDE_BY_DESCRIPTOR, PREFILL_WIDE_BY_POINTERS = PrefillConfig(64, 8, 2), PrefillConfig(32, 8, 2)

# `rope_and_write_kv`. Of 13 settings, 64 to 32,768 tokens, Qwen2.5-7B and Qwen3-0.6B: 4 x 4 with 4 warps is the
# fastest or within 4% of it everywhere (8,192 tokens: 42.2 and 40.0 us; 1 x 8 with 2 warps 51.4 and 44.7).
ROPE = Table(Rule(RopeConfig(1, 8, 4), tokens=at_most(31)), Rule(RopeConfig(4, 4, 4)))

# Weights up to so many are asked for before the wait: a whole step of Qwen3-0.6B is 3% faster at 1 and 8 rows, of
# Qwen2.5-7B 2% slower.
MAX_PREFETCHED_WEIGHTS = 1 << 23

# Experts, by the layer of Qwen3-30B-A3B (`bench_experts --sweep`). Up to MAX_PAIRS pairs of a token and an expert
# `grouped_gemv`, us of gate_up and down: 2 tokens 24.9 + 14.1, 27.1 + 14.6 in tiles; 4 tokens 46.2 + 25.4, 46.3 +
# 25.3; 8 tokens 89 + 48, 78 + 41. GATE_UP_ROW: alone (4, 256, 2, 1) takes 14.2 us and this 15.1; whole steps of one
# row took 2.71 ms with that on one machine, 2.62 with this on another.
# 4 bits, us: gpt-oss-20b at one row gate_up 17.0, down 15.6 (22.7 with slices of 128 columns); pairs at 4 | 6 | 8
# tokens 52 + 28, 74 + 39, 99 + 49, tiles 58 + 33, 74 + 37, 88 + 51. Pairs of 256 columns alone take 8% less, whole
# steps of 2 tokens 6% more. 30B-A3B at one row 8.9, 8.4; pairs at 2 | 4 | 8 tokens 13 + 7.4, 19 + 11, 33 + 19, tiles
# 21 + 12, 24 + 13, 37 + 19.
# itemsize: bytes of a weight. columns: of W.
FOUR_BITS = at_most(0.5)
GATE_UP_PAIRS: Table[GemvConfig] = Table(
    Rule(GemvConfig(32, 512, num_warps=4, num_stages=3), itemsize=FOUR_BITS),
    Rule(GemvConfig(4, 256, num_warps=2, num_stages=3)),
)
DOWN_PAIRS: Table[GemvConfig] = Table(
    Rule(GemvConfig(64, 512, num_warps=4, num_stages=3), itemsize=FOUR_BITS, columns=above(1024)),
    Rule(GemvConfig(32, 256, num_warps=2, num_stages=3), itemsize=FOUR_BITS),
    Rule(GemvConfig(8, 256, num_warps=4, num_stages=5)),
)
# The most pairs, and pairs of an expert: when more share an expert, tiles read its weights once.
MAX_PAIRS: Table[tuple[int, float]] = Table(Rule((64, 3 / 4), itemsize=FOUR_BITS), Rule((32, 1 / 4)))
GATE_UP_ROW: Table[GemvConfig] = Table(
    Rule(GemvConfig(32, 512, num_warps=4, num_stages=3), itemsize=FOUR_BITS),
    Rule(GemvConfig(8, 256, num_warps=4, num_stages=1), itemsize=at_most(1)),
    Rule(GemvConfig(4, 512, num_warps=4, num_stages=3)),
)
DOWN_ROW: Table[GemvConfig] = Table(
    Rule(GemvConfig(16, 512, num_warps=4, num_stages=2), itemsize=FOUR_BITS, columns=above(1024)),
    Rule(GemvConfig(16, 256, num_warps=4, num_stages=3), itemsize=FOUR_BITS),
    Rule(GemvConfig(4, 256, num_warps=4, num_stages=1)),
)

# More pairs: `grouped_gemm`. us at 8 | 64 | 256 | 8,192 tokens, gate_up 76 | 181 | 190 | 919, down 40 | 97 | 107 |
# 693; reading the chosen experts once takes 111 | 271 | 276 | 276 for both. At 8 | 64 | 256: e4m3 43 | 97 | 123 and
# 24.5 | 54 | 79, once 56 | 136 | 138; with 16 pairs and 4 warps, of which fewer programs fit, 52 | 110 | 142 and 31 |
# 69 | 88. int4 37 | 75 | 109 and 19 | 41 | 68, once 30 | 72 | 73. e2m1 of gpt-oss-20b at 64 | 512 | 1,024 |
# 2,048 | 8,192 tokens: gate_up 136 | 304 | 486 | 806 | 2,804, down - | 167 | 267 | 446 | 1,336, once 101 for both;
# pairs first and not columns, down with 128 of them instead of 256: 2,861 and 1,885. Its chunks are of 128 columns.
FOUR_BYTE_TILES = TileConfig(64, 32, num_stages=3, block_m=32)
BYTES = at_most(1)
VERY_FEW_PAIRS, FEW_PAIRS, SOME_PAIRS = at_most(0.5), at_most(4), at_most(32)  # of an expert
GROUPED_GATE_UP: Table[TileConfig] = Table(
    Rule(FOUR_BYTE_TILES, itemsize=above(2)),
    Rule(TileConfig(64, 256, num_stages=3, block_m=8), itemsize=BYTES, pairs_per_expert=FEW_PAIRS),
    Rule(TileConfig(64, 128, num_warps=2, num_stages=4, block_m=16), itemsize=FOUR_BITS, pairs_per_expert=at_most(8)),
    Rule(TileConfig(64, 128, num_stages=4, block_m=32), itemsize=FOUR_BITS, pairs_per_expert=SOME_PAIRS),
    Rule(TileConfig(64, 128, num_stages=3, block_m=64), itemsize=FOUR_BITS, pairs_per_expert=at_most(64)),
    Rule(
        TileConfig(64, 128, num_stages=3, block_m=128, columns_first=True),
        itemsize=FOUR_BITS,
        pairs_per_expert=at_most(256),
    ),
    Rule(TileConfig(128, 128, num_warps=8, num_stages=3, block_m=128, columns_first=True), itemsize=FOUR_BITS),
    Rule(TileConfig(64, 128, num_warps=2, num_stages=4, block_m=16), itemsize=BYTES, pairs_per_expert=SOME_PAIRS),
    Rule(TileConfig(32, 256, num_warps=2, num_stages=3, block_m=8), pairs_per_expert=VERY_FEW_PAIRS),
    Rule(TileConfig(64, 128, num_stages=3, block_m=16), pairs_per_expert=at_most(8)),
    Rule(TileConfig(64, 64, num_stages=3, block_m=32), pairs_per_expert=SOME_PAIRS),
    Rule(TileConfig(128, 64, num_stages=5, block_m=64), pairs_per_expert=at_most(64)),
    Rule(TileConfig(128, 64, num_warps=8, num_stages=4, block_m=128, columns_first=True, by_descriptor=True)),
)
GROUPED_DOWN: Table[TileConfig] = Table(
    Rule(FOUR_BYTE_TILES, itemsize=above(2)),
    Rule(TileConfig(64, 128, num_warps=2, num_stages=3, block_m=8), itemsize=FOUR_BITS, pairs_per_expert=FEW_PAIRS),
    Rule(TileConfig(64, 128, num_warps=2, num_stages=3, block_m=16), itemsize=FOUR_BITS, pairs_per_expert=SOME_PAIRS),
    Rule(
        TileConfig(128, 128, num_warps=8, num_stages=3, block_m=64, columns_first=True),
        itemsize=FOUR_BITS,
        pairs_per_expert=at_most(128),
    ),
    Rule(TileConfig(128, 128, num_warps=8, num_stages=3, block_m=256, columns_first=True), itemsize=FOUR_BITS),
    Rule(TileConfig(32, 128, num_warps=1, num_stages=3, block_m=8), itemsize=BYTES, pairs_per_expert=FEW_PAIRS),
    Rule(TileConfig(64, 128, num_warps=2, num_stages=3, block_m=16), itemsize=BYTES, pairs_per_expert=SOME_PAIRS),
    Rule(TileConfig(32, 128, num_warps=1, num_stages=4, block_m=8), pairs_per_expert=VERY_FEW_PAIRS),
    Rule(TileConfig(64, 64, num_stages=5, block_m=16), pairs_per_expert=at_most(8)),
    Rule(TileConfig(128, 64, num_stages=5, block_m=32), pairs_per_expert=SOME_PAIRS),
    Rule(TileConfig(128, 64, num_stages=3, block_m=64), pairs_per_expert=at_most(64)),
    Rule(TileConfig(128, 64, num_stages=3, block_m=128, columns_first=True), itemsize=BYTES),
    Rule(
        TileConfig(128, 64, num_stages=3, block_m=128, columns_first=True, by_descriptor=True),
        columns=at_most(1024),
    ),
    Rule(
        TileConfig(256, 64, num_warps=8, num_stages=3, block_m=128, columns_first=True, by_descriptor=True),
        pairs_per_expert=at_most(512),
    ),
    Rule(TileConfig(128, 64, num_warps=8, num_stages=3, block_m=256, columns_first=True, by_descriptor=True)),
)

# 4 bits on Hopper, pairs that are listed: `packed_experts`. us of gate_up and down, `grouped_gemm` in brackets:
# gpt-oss-20b at 64 tokens 117, 61 (135, 74); 256 169, 87 (217, 113); 1,024 365, 198 (487, 268); 8,192 2,044, 1,080
# (2,788, 1,330); 30B-A3B at 64 78, 41 (86, 41); 256 97, 63 (107, 65); 1,024 184, 111 (235, 164); 16,384 1,627, 1,082
# (2,140, 1,196). Up to 4 pairs of an expert, down of 768 columns is faster there: 36 and not 41 at 32 tokens. With
# groups of 32 columns, 4 words of scales in a step, three programs have too few registers: 125 and not 102 at 64.
TILE_OF_16 = ExpertTile(16, 128, num_warps=4, programs_per_sm=3)
TILE_OF_16_WITH_SCALES = ExpertTile(16, 128, num_warps=4, programs_per_sm=2)
TILE_OF_32 = ExpertTile(32, 128, num_warps=4, programs_per_sm=2)
TILE_OF_64 = ExpertTile(64, 128, num_warps=4, programs_per_sm=2)
TILE_OF_128 = ExpertTile(128, 256, num_warps=8, programs_per_sm=1)
MANY_SCALES = above(1)
PACKED_GATE_UP: Table[ExpertTile] = Table(
    Rule(TILE_OF_16_WITH_SCALES, pairs_per_expert=at_most(8), scale_words=MANY_SCALES),
    Rule(TILE_OF_16, pairs_per_expert=at_most(8)),
    Rule(TILE_OF_32, pairs_per_expert=at_most(16)),
    Rule(TILE_OF_64, pairs_per_expert=at_most(32)),
    Rule(TILE_OF_128),
)
PACKED_DOWN: Table[ExpertTile] = Table(
    Rule(TILE_OF_16_WITH_SCALES, pairs_per_expert=FEW_PAIRS, columns=above(1024), scale_words=MANY_SCALES),
    Rule(TILE_OF_16, pairs_per_expert=FEW_PAIRS, columns=above(1024)),
    Rule(TILE_OF_16_WITH_SCALES, pairs_per_expert=between(4, 8), scale_words=MANY_SCALES),
    Rule(TILE_OF_16, pairs_per_expert=between(4, 8)),
    Rule(TILE_OF_32, pairs_per_expert=between(8, 16)),
    Rule(TILE_OF_64, pairs_per_expert=between(16, 32)),
    Rule(TILE_OF_64, pairs_per_expert=between(32, 64), columns=at_most(1024)),
    Rule(TILE_OF_128, pairs_per_expert=above(32)),
)

# e4m3 experts whose x is quantized, too; with fewer pairs x stays in 16 bits. us of 16,384 tokens: gate_up 955, down
# 657, quantizing what is between 80; x in 16 bits, float16 in tensor cores: see docs/performance_log.md.
E4M3_GATE_UP: Table[TileConfig] = Table(
    Rule(
        TileConfig(64, 128, num_stages=4, block_m=64, columns_first=True, by_descriptor=True),
        pairs_per_expert=between(32, 64),
    ),
    Rule(
        TileConfig(128, 128, num_warps=8, num_stages=3, block_m=128, columns_first=True, by_descriptor=True),
        pairs_per_expert=above(64),
    ),
)
E4M3_DOWN: Table[TileConfig] = Table(
    Rule(
        TileConfig(128, 128, num_stages=4, block_m=64, columns_first=True, by_descriptor=True),
        pairs_per_expert=between(32, 64),
    ),
    Rule(
        TileConfig(128, 128, num_stages=3, block_m=128, columns_first=True, by_descriptor=True),
        pairs_per_expert=above(64),
    ),
)

# `latent_decode` and `latent_prefill`: keys of 576 numbers, of 16 heads or more. us at 64 x 4k | 8 x 8k | 256 x 1k:
# this 87.8 | 32.0 | 84.9; (64, 4, 2, 2) 94.0 | 36.7 | 89.0. (64, 8, 3, 1) takes 89.7 and 31.2 at the first two.
# With keys instead of heads as rows of the GEMMs, 98 at 64 x 4k, through tensor descriptors 99.
LATENT_DECODE = DecodeConfig(32, num_warps=4, num_stages=3, programs_per_sm=2)
LATENT_PREFILL = PrefillConfig(32, 8, 2)
LATENT_DECODE_FOUR_BYTES = DecodeConfig(16, num_warps=4, num_stages=2, programs_per_sm=2)
LATENT_PREFILL_FOUR_BYTES = PrefillConfig(16, 8, 1)
# Of keys of 192 numbers and values of 128; not swept yet.
EXPANDED_PREFILL = PrefillConfig(64, 8, 2)
EXPANDED_PREFILL_FOUR_BYTES = PrefillConfig(32, 8, 1)
