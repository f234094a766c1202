"""Tuned settings of grouped kernels of experts, like `kernels/gpu/tuning.py` for other kernels."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.tuning import Rule, Table, above, at_most, between


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """A tile: block_m pairs of an expert times block_n of its rows of W, with a gate those of gate and up together.

    num_warps: consumer warps, which multiply. programs_per_sm: programs that share a multiprocessor's registers and
    shared memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int


# Experts, by the layer of Qwen3-30B-A3B (`bench_experts --sweep`). Up to MAX_PAIRS pairs of a token and an expert
# `grouped_gemv`, us of gate_up and down: 2 tokens 24.9 + 14.1, 27.1 + 14.6 in tiles; 4 tokens 46.2 + 25.4, 46.3 +
# 25.3; 8 tokens 89 + 48, 78 + 41. GATE_UP_ROW: alone (4, 256, 2, 1) takes 14.2 us and this 15.1; whole steps of one
# row took 2.71 ms with that on one machine, 2.62 with this on another.
# columns above 2048: gpt-oss-20b, a whole layer of one row 87 -> 81 us, with DOWN_ROW's 93 -> 89.
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
# The most pairs, and pairs per expert: if more share an expert, tiles read its weights once.
MAX_PAIRS: Table[tuple[int, float]] = Table(Rule((64, 1 / 2), itemsize=FOUR_BITS), Rule((32, 1 / 4)))
GATE_UP_ROW: Table[GemvConfig] = Table(
    Rule(GemvConfig(32, 512, num_warps=4, num_stages=3), itemsize=FOUR_BITS),
    Rule(GemvConfig(8, 256, num_warps=4, num_stages=1), itemsize=at_most(1)),
    Rule(GemvConfig(4, 512, num_warps=2, num_stages=3), columns=above(2048)),
    Rule(GemvConfig(4, 512, num_warps=4, num_stages=3)),
)
DOWN_ROW: Table[GemvConfig] = Table(
    Rule(GemvConfig(16, 512, num_warps=4, num_stages=2), itemsize=FOUR_BITS, columns=above(1024)),
    Rule(GemvConfig(16, 256, num_warps=4, num_stages=3), itemsize=FOUR_BITS),
    Rule(GemvConfig(4, 256, num_warps=4, num_stages=3), itemsize=above(1), columns=above(2048)),
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
VERY_FEW_PAIRS, FEW_PAIRS, SOME_PAIRS = at_most(0.5), at_most(4), at_most(32)  # per expert
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

# 4 bits on Hopper: `packed_experts`. us of gate_up and down, `grouped_gemm` in brackets: gpt-oss-20b at 8 tokens 70,
# 40 (84, 45); 32 106, 56 (122, 65); 64 117, 61 (135, 74); 128 128, 68; 256 169, 87 (217, 113); 1,024 365, 198 (487,
# 268); 8,192 2,044, 1,080 (2,788, 1,330); 30B-A3B at 32 63, 37 (74, 37); 64 75, 45 (86, 41); 256 97, 63 (107, 65);
# 1,024 184, 111 (235, 164); 16,384 1,627, 1,082 (2,140, 1,196). Up to 4 pairs of an expert, down of 768 columns stays
# there. With groups of 32 columns a step has 4 words of scales, which take registers: gate_up at 8 | 32 | 64 tokens
# 42 | 81 | 93, in tiles of 128 rows of W, two of which fit, 47 | 90 | 100.
TILE_OF_8 = ExpertTile(8, 128, num_warps=4, programs_per_sm=4)
TILE_OF_8_WITH_SCALES = ExpertTile(8, 64, num_warps=4, programs_per_sm=5)
TILE_OF_16 = ExpertTile(16, 128, num_warps=4, programs_per_sm=3)
TILE_OF_16_WITH_SCALES = ExpertTile(16, 128, num_warps=4, programs_per_sm=2)
TILE_OF_32 = ExpertTile(32, 128, num_warps=4, programs_per_sm=3)
TILE_OF_32_WITH_SCALES = ExpertTile(32, 128, num_warps=4, programs_per_sm=2)
NARROW_TILE_OF_32 = ExpertTile(32, 64, num_warps=4, programs_per_sm=4)
TILE_OF_64 = ExpertTile(64, 128, num_warps=4, programs_per_sm=2)
TILE_OF_128 = ExpertTile(128, 256, num_warps=8, programs_per_sm=1)
MANY_SCALES = above(1)
PACKED_GATE_UP: Table[ExpertTile] = Table(
    Rule(TILE_OF_8_WITH_SCALES, pairs_per_expert=FEW_PAIRS, scale_words=MANY_SCALES),
    Rule(TILE_OF_8, pairs_per_expert=FEW_PAIRS),
    Rule(TILE_OF_16_WITH_SCALES, pairs_per_expert=at_most(8), scale_words=MANY_SCALES),
    Rule(TILE_OF_16, pairs_per_expert=at_most(8)),
    Rule(TILE_OF_32_WITH_SCALES, pairs_per_expert=at_most(16), scale_words=MANY_SCALES),
    Rule(TILE_OF_32, pairs_per_expert=at_most(16)),
    Rule(TILE_OF_64, pairs_per_expert=at_most(32)),
    Rule(TILE_OF_128),
)
PACKED_DOWN: Table[ExpertTile] = Table(
    Rule(TILE_OF_8_WITH_SCALES, pairs_per_expert=FEW_PAIRS, columns=above(1024), scale_words=MANY_SCALES),
    Rule(TILE_OF_8, pairs_per_expert=FEW_PAIRS, columns=above(1024)),
    Rule(NARROW_TILE_OF_32, pairs_per_expert=between(4, 16), scale_words=MANY_SCALES),
    Rule(TILE_OF_16, pairs_per_expert=between(4, 8)),
    Rule(TILE_OF_32, pairs_per_expert=between(8, 16)),
    Rule(TILE_OF_64, pairs_per_expert=between(16, 32)),
    Rule(TILE_OF_64, pairs_per_expert=between(32, 64), columns=at_most(1024)),
    Rule(TILE_OF_128, pairs_per_expert=above(32)),
)

# e4m3 experts whose x is quantized, too; with fewer pairs x stays in 16 bits. us of 16,384 tokens: gate_up 955, down
# 657, quantization in between 80; x in 16 bits, float16 in tensor cores: see docs/performance_log.md.
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
