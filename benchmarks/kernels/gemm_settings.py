"""Settings that `bench_gemm --sweep` tries."""

from __future__ import annotations

from kernels.gpu.few_rows.gemm_configs import GemvConfig, TileConfig
from kernels.gpu.quantization.quantized_tuning import SlicedKConfig, StreamConfig

GEMVS = [
    GemvConfig(block_n, block_k, num_warps, num_stages)
    for block_n, block_k, num_warps in (
        (4, 512, 4),
        (8, 512, 4),
        (16, 512, 4),
        (2, 512, 2),
        (4, 1024, 4),
        (4, 256, 2),
    )
    for num_stages in (1, 3, 5)
]
TILES = [
    TileConfig(*option)
    for option in (
        (64, 128, 1, 4, 6), (64, 128, 2, 4, 6), (64, 128, 1, 4, 4), (64, 128, 4, 4, 4), (64, 64, 1, 4, 8),
        (32, 128, 1, 4, 6), (32, 128, 1, 4, 8), (32, 256, 1, 4, 4), (32, 128, 2, 4, 6), (16, 256, 1, 4, 4),
        (16, 256, 1, 4, 6), (16, 512, 1, 4, 3), (32, 128, 1, 2, 6), (128, 64, 1, 4, 6),
    )
]  # fmt: skip
TILES_8_BIT = [
    TileConfig(*option)
    for option in (
        (64, 256, 1, 4, 4), (64, 256, 2, 4, 4), (64, 256, 4, 4, 4), (64, 128, 1, 4, 6), (64, 128, 2, 4, 6),
        (64, 512, 1, 4, 3), (64, 512, 2, 4, 3), (128, 128, 1, 4, 5), (128, 128, 2, 4, 5),
    )
]  # fmt: skip
TILES_8_BIT_MANY_ROWS = [
    TileConfig(*option)
    for option in (
        (64, 128, 1, 4, 4, 128), (128, 128, 1, 8, 4, 128), (128, 128, 1, 8, 3, 256), (128, 128, 1, 8, 4, 256),
        (256, 128, 1, 8, 3, 128), (128, 128, 1, 4, 4, 128),
    )
]  # fmt: skip
SLICED_K = [
    SlicedKConfig(*option)
    for option in (
        (16, 128, 4, 4), (16, 128, 4, 6), (16, 128, 4, 3, 4), (16, 128, 4, 3, 6), (16, 128, 4, 8, 2), (16, 256, 4, 4),
        (16, 128, 2, 5, 1), (32, 128, 4, 4), (16, 256, 8, 3),
    )
]  # fmt: skip
PACKED_ROWS = [
    SlicedKConfig(block_n, 128, *option)
    for block_n, *option in (
        (16, 4, 3, 4), (16, 4, 3, 2), (16, 8, 3, 2), (16, 16, 3, 1), (16, 16, 2), (32, 4, 3), (32, 4, 3, 2),
        (32, 8, 2), (64, 4, 3), (16, 2, 3), (32, 2, 3), (32, 2, 4), (64, 2, 3), (16, 8, 3, 1),
    )
]  # fmt: skip
PACKED_STREAMS = [StreamConfig(*option) for option in ((1, 4, 240), (2, 4, 128), (3, 4, 80), (1, 8, 168), (2, 8, 80))]
PACKED_TILES = [
    TileConfig(block_n, 128, splits, num_warps, num_stages, block_m)
    for block_m in (16, 32, 64, 128)
    for block_n, num_warps, num_stages in ((64, 4, 4), (64, 4, 6), (128, 8, 3), (128, 4, 3))
    for splits in (1, 2, 4, 8)
]
