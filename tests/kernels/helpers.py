"""Inputs and comparisons that several kernel tests share."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantization.quantized_gemm import FP8_DTYPE, quantize_rows_fp8, quantize_rows_int8

# The interpreter multiplies bfloat16 matrices by their bit patterns; kernels treat float16 in the same way.
HALF_DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# Triton's interpreter truncates to bfloat16, while a GPU rounds to nearest.
BFLOAT16_BOUND = 5e-3 if torch.cuda.is_available() else 1.5e-2
# Compiled kernels multiply by 128 + w of int4 and subtract 128 times the sum of x, which costs float32 digits.
INT4_FLOAT32_BOUND = 2e-5 if torch.cuda.is_available() else 2e-6

QUANTIZERS = {torch.int8: quantize_rows_int8, FP8_DTYPE: quantize_rows_fp8}  # references


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return norm(difference) / norm(reference); NaN anywhere gives NaN, which is below no bound."""
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm())


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows of `values` by their scales, exactly."""
    return values.double() * scales.double()[:, None]


def windowed_attention(
    q: Tensor, keys: Tensor, values: Tensor, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Compute the formula of `kernels/paged_attention.py` with a window, if it is not 0, and sinks (num_heads,).

    See `attend_causally` for the shapes.
    """
    num_queries, num_heads, head_dim = q.shape
    seq_len = keys.shape[1]
    keys, values = (each.repeat_interleave(num_heads // keys.shape[0], dim=0) for each in (keys, values))
    positions = torch.arange(seq_len - num_queries, seq_len, device=q.device)[:, None]
    tokens = torch.arange(seq_len, device=q.device)[None]
    visible = tokens <= positions
    if window:
        visible &= tokens > positions - window
    scores = torch.einsum("qhd,hkd->hqk", q, keys) * head_dim**-0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, num_queries, 1)], dim=-1)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., :seq_len], values)


def poisoned_pool(
    num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """Return a KV pool of NaN, so that reads before writes show."""
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def fill_sequence(pool: Tensor, layer: int, block_ids: list[int], seq_len: int) -> Tensor:
    """Store random K and V of a sequence in its blocks and return them: (2, num_kv_heads, seq_len, head_dim)."""
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    kv = torch.randn(2, num_kv_heads, seq_len, head_dim, device=pool.device).to(pool.dtype)
    for index, block_id in enumerate(block_ids):
        part = kv[:, :, index * block_size : (index + 1) * block_size]
        pool[block_id, layer, :, :, : part.shape[2]] = part
    return kv


def block_tables_for(seq_lens: list[int], block_size: int, device: torch.device) -> tuple[list[list[int]], Tensor]:
    """Return shuffled blocks for each sequence, and an int32 table of them whose unused entries are out of range."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    shuffled = torch.randperm(sum(counts)).tolist()
    tables, first = [], 0
    for count in counts:
        tables.append(shuffled[first : first + count])
        first += count
    padded = torch.full((len(seq_lens), max(counts) + 1), 1 << 30, dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    return tables, padded.to(device)


def give_back_blocks(pool: Tensor, tables: list[list[int]], table: Tensor, first_keys: list[int]) -> None:
    """Fill blocks before each sequence's first key with NaN, and set their entries out of range."""
    for row, (ids, first_key) in enumerate(zip(tables, first_keys, strict=True)):
        count = first_key // pool.shape[4]
        pool[ids[:count]] = float("nan")
        table[row, :count] = -(1 << 30)
