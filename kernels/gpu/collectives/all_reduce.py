"""One-shot collectives over symmetric memory, for few rows: all-gather, and all-reduce fused with RMS norm.

The all-reduce also adds the residual, and may quantize the norm. The ranks' GPUs map each other's memory. Each has an
inbox of two halves with a slot per sender, and a flag per sender and program. A program pushes its part into all
peers' inboxes, raises its flags there, and waits for the peers' flags. Collectives are counted per program on the
device, so kernels can be replayed in a graph; the count (epoch) also selects the half. Two halves are enough: a rank
at epoch e + 2 has seen all peers at e + 1, after their kernel of epoch e. These are for latency; NCCL is for the
bandwidth of long prompts.

All ranks must run the same collectives in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.elementwise.rms_norm import num_warps_for
from kernels.gpu.launch import is_compiled, overlaps_launches, wait_for_predecessor
from kernels.gpu.quantization.quantize import empty_quantized, largest_value, quantize_row

GATHER_CHUNK = 4096
MAX_POLLS = tl.constexpr(1 << 27)  # polls of a flag, for a minute or two: a peer may be compiling


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """One rank's view of all ranks' memory for one kind of collective.

    addresses: int64 (size,), where each rank's memory is mapped here. counters: int32 (num_programs,), initially
    zero. width: elements that one program sends.
    In memory: flags int32 (size, num_programs), initially zero, then the inbox (2, size, num_programs, width).
    """

    addresses: Tensor
    counters: Tensor
    rank: int
    size: int
    num_programs: int
    width: int
    dtype: torch.dtype

    @property
    def flag_bytes(self) -> int:
        return _flag_bytes(self.size, self.num_programs)


def _flag_bytes(size: int, num_programs: int) -> int:
    return -(-4 * size * num_programs // 256) * 256


def symmetric_bytes(size: int, num_programs: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of each rank's memory."""
    return _flag_bytes(size, num_programs) + 2 * size * num_programs * width * dtype.itemsize


@triton.jit
def give_up(COMPILED: tl.constexpr):
    """End the kernel with an error: the peer is gone, and nothing else would report it."""
    if COMPILED:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _push(
    addresses_ptr, value, place, columns, inside, program, num_programs, epoch, width, flag_bytes,
    RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write `value` to place `place` of every peer's inbox, then raise this program's flags there."""
    half = (epoch & 1).to(tl.int64)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox = (tl.load(addresses_ptr + peer) + flag_bytes).to(tl.pointer_type(value.dtype))
            start = ((half * SIZE + RANK) * num_programs + place) * width
            tl.store(inbox + start + columns, value, mask=inside)
    tl.debug_barrier()  # all threads have written
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + RANK * num_programs + program, epoch, sem="release", scope="sys")


@triton.jit
def _pull(
    addresses_ptr, sender, place, columns, inside, program, num_programs, epoch, width, flag_bytes,
    DTYPE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Wait until `sender` has pushed its part of this epoch, and read it."""
    own = tl.load(addresses_ptr + RANK)
    flag = own.to(tl.pointer_type(tl.int32)) + sender * num_programs + program
    num_polls = 0
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - epoch < 0:
        num_polls += 1
        if num_polls == MAX_POLLS:
            give_up(COMPILED)
    half = (epoch & 1).to(tl.int64)
    start = ((half * SIZE + sender) * num_programs + place) * width
    inbox = (own + flag_bytes).to(tl.pointer_type(DTYPE))
    return tl.load(inbox + start + columns, mask=inside, other=0.0, cache_modifier=".cv")


@triton.jit
def _all_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, addresses_ptr, counters_ptr, n, num_programs, width,
    flag_bytes, eps, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, MAX: tl.constexpr,
    OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One row per program. MAX: the largest quantized value; 0 stores the norm unquantized."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(OVERLAPS)
    x = tl.load(x_ptr + row * n + columns, mask=inside, other=0.0)
    epoch = tl.load(counters_ptr + row) + 1
    _push(addresses_ptr, x, row, columns, inside, row, num_programs, epoch, width, flag_bytes, RANK, SIZE)
    total = tl.load(residual_ptr + row * n + columns, mask=inside, other=0.0)
    dtype = total.dtype
    total = total.to(tl.float32)
    for sender in tl.static_range(SIZE):
        if sender == RANK:
            total += x.to(tl.float32)
        else:
            part = _pull(
                addresses_ptr, sender, row, columns, inside, row, num_programs, epoch, width, flag_bytes,
                x.dtype, RANK, SIZE, COMPILED,
            )  # fmt: skip
            total += part.to(tl.float32)
    rounded = total.to(dtype)
    tl.store(residual_ptr + row * n + columns, rounded, mask=inside)
    value = rounded.to(tl.float32)
    value = (value * tl.rsqrt(tl.sum(value * value, axis=0) / n + eps) * weight).to(dtype)
    if MAX > 0:
        quantize_row(value.to(tl.float32), out_ptr, scales_ptr, row, n, columns, MAX, COMPILED)
    else:
        tl.store(out_ptr + row * n + columns, value, mask=inside)
    tl.store(counters_ptr + row, epoch)


@triton.jit
def _all_gather_kernel(
    x_ptr, out_ptr, only_ptr, addresses_ptr, counters_ptr, n, num_programs, flag_bytes, HAS_ONLY: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    if HAS_ONLY:  # noqa: SIM102 - known when the kernel is compiled
        if tl.load(only_ptr + row) == 0:
            return
    program = row * tl.num_programs(0) + tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    columns = tl.program_id(0) * CHUNK + lanes
    inside = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=inside, other=0.0)
    epoch = tl.load(counters_ptr + program) + 1
    _push(addresses_ptr, x, program, lanes, inside, program, num_programs, epoch, CHUNK, flag_bytes, RANK, SIZE)
    for sender in tl.static_range(SIZE):
        part = x
        if sender != RANK:
            part = _pull(
                addresses_ptr, sender, program, lanes, inside, program, num_programs, epoch, CHUNK, flag_bytes,
                x.dtype, RANK, SIZE, COMPILED,
            )  # fmt: skip
        tl.store(out_ptr + (row * SIZE + sender) * n + columns, part, mask=inside)
    tl.store(counters_ptr + program, epoch)


def all_reduce_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: SymmetricMemory) -> Tensor:
    """Add the sum of all ranks' x (num_rows, n) to `residual`, equal on all ranks, in place, and return its norm.

    One program per row; all tensors contiguous.
    """
    out = torch.empty_like(residual)
    _all_reduce(x, residual, weight, eps, peers, out, None, 0.0)
    return out


def all_reduce_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: SymmetricMemory, dtype: torch.dtype,
    num_planes: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `all_reduce_rms_norm`; return the norm as values of `dtype` and scales, see `quantize_rows`."""
    num_rows, n = residual.shape
    values, scales = empty_quantized(num_rows, n, dtype, num_planes, residual.device)
    _all_reduce(x, residual, weight, eps, peers, values, scales, largest_value(dtype, num_planes))
    return values, scales


def _all_reduce(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: SymmetricMemory, out: Tensor,
    scales: Tensor | None, largest: float,
) -> None:  # fmt: skip
    num_rows, n = x.shape
    if num_rows > peers.num_programs or n > peers.width or x.dtype != peers.dtype:
        raise ValueError(f"{list(x.shape)} {x.dtype} do not fit {peers.num_programs} x {peers.width} {peers.dtype}")
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("x and the residual must be contiguous")
    overlaps = overlaps_launches(x)
    _all_reduce_norm_kernel[(num_rows,)](
        x, residual, weight, out, out if scales is None else scales, peers.addresses, peers.counters, n,
        peers.num_programs, peers.width, peers.flag_bytes, eps, RANK=peers.rank, SIZE=peers.size,
        BLOCK=triton.next_power_of_2(n), MAX=largest, OVERLAPS=overlaps, COMPILED=is_compiled(x),
        num_warps=16 if n > 4096 else num_warps_for(n), launch_pdl=overlaps,
    )  # fmt: skip


def all_gather(x: Tensor, peers: SymmetricMemory, only: Tensor | None = None) -> Tensor:
    """Gather each rank's x (num_rows, n), contiguous -> (num_rows, size * n), in the order of ranks.

    A program sends GATHER_CHUNK columns of a row, which is the width of `peers`. only: int (num_rows,), equal on all
    ranks: rows with 0 are skipped, and undefined.
    """
    num_rows, n = x.shape
    chunks = triton.cdiv(n, GATHER_CHUNK)
    if num_rows * chunks > peers.num_programs or peers.width != GATHER_CHUNK or x.dtype != peers.dtype:
        raise ValueError(f"{list(x.shape)} {x.dtype} do not fit {peers.num_programs} x {peers.width} {peers.dtype}")
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    out = torch.empty(num_rows, peers.size * n, dtype=x.dtype, device=x.device)
    overlaps = overlaps_launches(x)
    _all_gather_kernel[(chunks, num_rows)](
        x, out, x if only is None else only, peers.addresses, peers.counters, n, peers.num_programs,
        peers.flag_bytes, HAS_ONLY=only is not None, RANK=peers.rank, SIZE=peers.size, CHUNK=GATHER_CHUNK,
        OVERLAPS=overlaps, COMPILED=is_compiled(x), num_warps=8, launch_pdl=overlaps,
    )  # fmt: skip
    return out
