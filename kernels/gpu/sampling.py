"""Sampling on a GPU without a sort and without the host: greedy, temperature, top-k, top-p, min-p, seeded noise.

A token is sampled as  argmax_i l_i / T - log E_i  over the tokens that are kept, with E_i the exponential noise of
`kernels/gumbel.py`, a function of only (seed, position, token). A token is kept, as in the engine's host sampler, if
top-k: at most k - 1 tokens are likelier; top-p: likelier tokens together have less than p of the mass after top-k;
min-p: p_i >= min_p * p_max. All ties at a threshold are kept; the lowest id wins a tie of the argmax.

`_chunk_kernel` reads the logits once, with many programs per row, and writes each chunk's winner, maximum and sum of
exponentials. `_finish_kernel`, with one program per row, finds the winner of the row. If the row is truncated: when
the winner among all tokens is kept, it is the result; when not, no token that is as unlikely is kept either. So each
pass counts the tokens and the mass above the current winner, and finds the winner among them, until one is kept: one
pass for typical parameters. Top-k starts at the k-th largest of the chunks' maxima, a lower bound of the k-th largest
logit. Only top-k together with top-p needs the k-th largest itself, which is found by bisection.

Reference: `sample_reference` of `tests/kernels/test_sampling.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.gumbel import gumbel
from kernels.gpu.launch import overlaps_launches, wait_for_predecessor

CHUNK = 2048  # 75 programs a row at 152,064 tokens: their maxima bound any top-k up to 75
# For the one program that reads a truncated row. 8192 at a time spill registers (top-p of one row 56 us, here 53);
# loads pipelined through shared memory are slower (61 to 83).
ROW_BLOCK, ROW_WARPS, ROW_STAGES = 4096, 32, 1
HIGHEST = tl.constexpr(1e30)  # larger logits are treated as infinite
NOT_FINITE, NOTHING_ALLOWED = -1, -2  # in the place of a token
_NOT_FINITE, _NOTHING_ALLOWED = tl.constexpr(NOT_FINITE), tl.constexpr(NOTHING_ALLOWED)


@triton.jit
def _chunk_kernel(
    logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, stats_ptr,
    vocab_size, row_stride, first_id, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    temperature = tl.load(temperatures_ptr + row)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    highest = tl.max(logits, axis=0)
    score = highest
    total = 0.0
    if temperature > 0:
        # Relative to the chunk's maximum, so that tiny temperatures stay finite and precise.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        scaled = (logits - base) / tl.maximum(temperature, 1e-5)
        total = tl.sum(tl.exp(scaled), axis=0)
        noisy = scaled + gumbel(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), first_id + ids)
        score, place = tl.max(noisy, axis=0, return_indices=True)
    else:
        place = tl.argmax(logits, axis=0)
    is_broken = tl.max((logits != logits).to(tl.int32), axis=0) > 0
    at = stats_ptr + (row * tl.num_programs(0) + chunk) * 4
    tl.store(at, score)
    tl.store(at + 1, (first_id + chunk * CHUNK + place).to(tl.float32, bitcast=True))
    tl.store(at + 2, tl.where(is_broken, float("nan"), highest))
    tl.store(at + 3, total)


@triton.jit
def _order_key(value):
    """Map float32 to int32 of the same order; 0 and -0 are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _floor_key(maxima, num_chunks, k):
    """Return the key of the k-th largest chunk maximum, which at least k logits reach; without one, that of -inf."""
    keys = _order_key(maxima).to(tl.int64)
    reaches = tl.sum((keys[:, None] <= keys[None, :]).to(tl.int32), axis=1)  # number of maxima that reach each one
    lowest = tl.full((), -2139095041, tl.int64)
    return tl.maximum(tl.max(tl.where(reaches >= k, keys, lowest), axis=0), lowest)


@triton.jit
def _kth_key(row_ptr, vocab_size, k, low, highest, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Find the largest key that at least k logits reach, given that at least k reach `low`, by bisection.

    Each pass has three pivots. Stops early at a key that exactly k logits reach, which selects the same logits.
    """
    high = _order_key(highest).to(tl.int64) + 1  # no logit reaches it
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        counts_1 = tl.zeros((BLOCK,), tl.int32)
        counts_2 = tl.zeros((BLOCK,), tl.int32)
        counts_3 = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
            ids = start + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            keys = _order_key(logits)
            counts_1 += (keys >= first).to(tl.int32)
            counts_2 += (keys >= second).to(tl.int32)
            counts_3 += (keys >= third).to(tl.int32)
        count_1 = tl.sum(counts_1, axis=0)
        count_2 = tl.sum(counts_2, axis=0)
        count_3 = tl.sum(counts_3, axis=0)
        low = tl.where(count_3 >= k, third, tl.where(count_2 >= k, second, tl.where(count_1 >= k, first, low)))
        bound = tl.where(count_1 >= k, tl.where(count_2 >= k, third, second), first)
        is_exact = (count_1 == k) | (count_2 == k) | (count_3 == k)
        exact = tl.where(count_3 == k, third, tl.where(count_2 == k, second, first))
        low = tl.where(is_exact, exact, low)
        high = tl.where(is_exact, exact + 1, tl.where(count_3 >= k, high, tl.minimum(bound, high)))
    return low


@triton.jit
def _mass_from(row_ptr, vocab_size, key, highest, temperature, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Sum up exp((l - max) / T) over the logits that reach `key`."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        mass += tl.where(_order_key(logits).to(tl.int64) >= key, tl.exp((logits - highest) / temperature), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _finish_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr, seeds_ptr, positions_ptr,
    stats_ptr, token_ids_ptr, last_tokens_ptr,
    vocab_size, row_stride, num_chunks, HAS_LAST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    at = stats_ptr + (row * num_chunks + chunks) * 4
    maxima = tl.load(at + 2, mask=exists, other=float("-inf"))
    scores = tl.load(at, mask=exists, other=float("-inf"))
    highest = tl.max(maxima, axis=0)
    is_broken = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
    is_valid = (not is_broken) & (tl.abs(highest) < HIGHEST)
    is_random = (temperature > 0) & is_valid
    temperature = tl.maximum(temperature, 1e-5)
    base = tl.where(is_valid, highest, 0.0)
    distances = (maxima - base) / temperature
    scores = tl.where(is_random, scores + distances, scores)
    best = stats_ptr + (row * num_chunks + tl.argmax(scores, axis=0)) * 4
    winner = tl.load(best + 1).to(tl.int32, bitcast=True)

    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if is_random & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        row_ptr = logits_ptr + row * row_stride
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        sums = tl.load(at + 3, mask=exists, other=0.0)
        total = tl.sum(sums * tl.exp(distances), axis=0)
        # Tokens below `floor` are not kept; without top-k it is below all of them.
        floor = _floor_key(maxima, num_chunks, tl.where(has_top_k, top_k, vocab_size))
        if has_top_k & (top_p < 1.0):
            floor = _kth_key(row_ptr, vocab_size, top_k, floor, highest, BLOCK, NUM_STAGES)
            total = _mass_from(row_ptr, vocab_size, floor, highest, temperature, BLOCK, NUM_STAGES)
        most_before = tl.where(has_top_k, top_k, vocab_size)
        is_kept = False
        while not is_kept:
            candidate = tl.load(row_ptr + winner).to(tl.float32)
            num_before = tl.zeros((BLOCK,), tl.int32)
            mass_before = tl.zeros((BLOCK,), tl.float32)
            best_score = tl.full((BLOCK,), float("-inf"), tl.float32)
            best_id = tl.zeros((BLOCK,), tl.int32)
            for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
                ids = start + tl.arange(0, BLOCK)
                logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
                above = (logits > candidate) & (_order_key(logits) >= floor)
                if tl.max(above.to(tl.int32), axis=0) > 0:
                    scaled = (logits - highest) / temperature
                    num_before += above.to(tl.int32)
                    mass_before += tl.where(above, tl.exp(scaled), 0.0)
                    score = tl.where(above, scaled + gumbel(seed, position, ids), float("-inf"))
                    best_id = tl.where(score > best_score, ids, best_id)
                    best_score = tl.maximum(score, best_score)
            is_above_floor = _order_key(candidate) >= floor
            count = tl.sum(num_before, axis=0)
            mass = tl.sum(mass_before, axis=0)
            by_ratio = (min_p <= 0.0) | (tl.exp((candidate - highest) / temperature) >= min_p)
            by_mass = (top_p >= 1.0) | (mass < top_p * total)
            is_kept = (count == 0) | ((count < most_before) & is_above_floor & by_mass & by_ratio)
            if not is_kept:
                place = tl.argmax(best_score, axis=0)
                winner = tl.sum(tl.where(tl.arange(0, BLOCK) == place, best_id, 0), axis=0)
    nothing = tl.where(highest == float("-inf"), _NOTHING_ALLOWED, _NOT_FINITE)  # `highest` of a broken row is NaN
    tl.store(token_ids_ptr + row, tl.where(is_valid, winner, nothing).to(tl.int64))
    if HAS_LAST:
        is_in_use = tl.load(positions_ptr + row) > 0
        tl.store(last_tokens_ptr + row, winner.to(tl.int64), mask=is_valid & is_in_use)


def num_chunks_of(vocab_size: int) -> int:
    return -(-vocab_size // CHUNK)


def chunk_stats(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, stats: Tensor, vocab_size: int,
    first_id: int = 0,
) -> None:  # fmt: skip
    """Write the statistics of each chunk of each row: float32 (rows, num_chunks_of(vocab_size), 4), contiguous.

    logits: (rows, columns < 2^21), float32 or bfloat16, columns of stride 1. temperatures: float32 (rows,), 0 is
    greedy. seeds: int64 (rows,). positions: int (rows,), the position of the sampled token, 0 for rows that are not
    in use. vocab_size: number of columns to use. first_id: token id of the first one.
    """
    num_rows, num_chunks = logits.shape[0], num_chunks_of(vocab_size)
    if stats.shape != (num_rows, num_chunks, 4) or not stats.is_contiguous():
        raise ValueError(f"statistics of shape {list(stats.shape)} do not fit {num_rows} rows of {vocab_size} tokens")
    overlaps = overlaps_launches(logits)
    _chunk_kernel[(num_chunks, num_rows)](
        logits, temperatures, seeds, positions, stats, vocab_size, logits.stride(0), first_id, CHUNK=CHUNK,
        OVERLAPS=overlaps, num_warps=4, launch_pdl=overlaps,
    )  # fmt: skip


def choose_tokens(
    logits: Tensor, stats: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor,
    seeds: Tensor, positions: Tensor, token_ids: Tensor, last_tokens: Tensor | None = None,
) -> None:  # fmt: skip
    """Sample a token per row into `token_ids` int64 (rows,); NOT_FINITE or NOTHING_ALLOWED if there is none.

    logits: of all tokens; rows without truncation do not read them. stats: of all chunks. top_ks: int32, 0 is off.
    top_ps: float32, 1 is off. min_ps: float32, 0 is off. All are (rows,), read on the device. last_tokens: int64
    (rows,), also receives the valid tokens of rows in use. Other arguments: see `chunk_stats`.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = stats.shape[1]
    overlaps = overlaps_launches(logits)
    _finish_kernel[(num_rows,)](
        logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, stats, token_ids,
        last_tokens if last_tokens is not None else token_ids, vocab_size, logits.stride(0), num_chunks,
        HAS_LAST=last_tokens is not None,
        CHUNKS=triton.next_power_of_2(num_chunks), BLOCK=min(ROW_BLOCK, triton.next_power_of_2(vocab_size)),
        NUM_STAGES=ROW_STAGES, OVERLAPS=overlaps, num_warps=ROW_WARPS, launch_pdl=overlaps,
    )  # fmt: skip
