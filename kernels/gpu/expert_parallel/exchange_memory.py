"""Memory for exchanges of ranks that divide rows around experts: one-sided writes and flags.

The ranks' GPUs map each other's memory, as in `kernels/gpu/collectives/all_reduce.py`. Program t of a collective
sends what this rank has for row t of each rank, then raises a flag at every peer, whether a row was sent or not, and
waits for all peers' flags. Each collective is counted per program on the device (its epoch), so kernels can be
replayed in a graph; a flag is twice the epoch, plus one if a row was sent.

There is no double buffering. Before a rank runs a collective again, it has run another one, for which it had the
flags of all peers; they raised these after the kernels that read the memory that it is about to overwrite. So ranks
must run the same collectives with the same shapes in the same order, and never one twice in a row:

    scatter, gather                       around attention and MLPs, see `kernels/gpu/expert_parallel/divided_rows.py`
    scatter, dispatch, combine, gather    around experts, see `kernels/gpu/expert_parallel/expert_dispatch.py`,
                                          `expert_combine.py`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.collectives.all_reduce import MAX_POLLS, give_up

DISPATCH = tl.constexpr(0)  # kinds of collectives
COMBINE = tl.constexpr(1)
SCATTER = tl.constexpr(2)
GATHER = tl.constexpr(3)
NUM_KINDS = 4
ALIGNMENT = 256  # bytes


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """The layout of each rank's memory, in this order:

        flags      int32 (kinds, size, max_rows), initially zero
        choices    int32 (size * rows, 2, top_k), of received rows: experts, counted from the rank's first, and shares
        received   (size * rows, width), rows received for this rank's experts; rows: per rank in this step
        inboxes    (size, max_rows, width) each, of combine, scatter and gather

    size: ranks. max_rows: most rows of a rank per step. width: of hidden states. top_k: choices per row.
    """

    size: int
    max_rows: int
    width: int
    top_k: int
    dtype: torch.dtype

    @property
    def choices_at(self) -> int:
        """Offset in bytes, as all offsets are."""
        return _aligned(4 * NUM_KINDS * self.size * self.max_rows)

    @property
    def received_at(self) -> int:
        return self.choices_at + _aligned(8 * self.size * self.max_rows * self.top_k)

    def inbox_at(self, kind: int) -> int:
        """Return an inbox's offset. kind: COMBINE, SCATTER or GATHER."""
        return self.received_at + kind * _aligned(self.size * self.max_rows * self.width * self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        return self.inbox_at(NUM_KINDS)


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """One rank's view of all ranks' memory.

    addresses: int64 (size,), where each rank's memory is mapped here. own: uint8 (num_bytes,), this rank's. epochs:
    int32 (kinds, max_rows), and arrived: int32 (2,), are private to this rank and initially zero. moved: int64 (2,),
    counts the rows dispatched and combined to other ranks, unless None.
    """

    layout: ExchangeLayout
    rank: int
    addresses: Tensor
    own: Tensor
    epochs: Tensor
    arrived: Tensor
    moved: Tensor | None = None

    @classmethod
    def over(cls, layout: ExchangeLayout, rank: int, addresses: Tensor, own: Tensor, counts: bool) -> ExchangeMemory:
        """counts: count the rows that move."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=addresses.device)

        moved = zeros(2, dtype=torch.int64) if counts else None
        return cls(layout, rank, addresses, own, zeros(NUM_KINDS, layout.max_rows), zeros(2), moved)

    def received(self, num_rows: int) -> Tensor:
        """Return the memory of received rows, (size * num_rows, width)."""
        layout = self.layout
        count = layout.size * num_rows * layout.width * layout.dtype.itemsize
        rows = self.own[layout.received_at : layout.received_at + count]
        return rows.view(layout.dtype).view(-1, layout.width)


def rows_a_rank(num_rows: int, size: int) -> int:
    """Return how many of a step's rows each rank has; the last ranks may have fewer."""
    return -(-num_rows // size)


def own_rows(num_tokens: int, memory: ExchangeMemory) -> int:
    """Return how many of this rank's rows exist."""
    rows = rows_a_rank(num_tokens, memory.layout.size)
    return max(0, min(rows, num_tokens - memory.rank * rows))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@triton.jit
def flag_of(
    addresses_ptr, owner, sender, program, max_rows, KIND: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the flag at rank `owner` that `sender` raises."""
    flags = tl.load(addresses_ptr + owner).to(tl.pointer_type(tl.int32))
    return flags + (KIND * SIZE + sender) * max_rows + program


@triton.jit
def wait_for_flag(flag, value, COMPILED: tl.constexpr):
    """Wait until a peer has raised one of this rank's flags to at least `value`. Returns the flag."""
    num_polls = 0
    found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while found - value < 0:
        num_polls += 1
        if num_polls == MAX_POLLS:
            give_up(COMPILED)
        found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    return found


@triton.jit
def memory_of(addresses_ptr, owner, at, DTYPE: tl.constexpr):
    """Return a pointer `at` bytes into the memory of rank `owner`."""
    return tl.multiple_of((tl.load(addresses_ptr + owner) + at).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def of_rank(flags, rank, RANKS: tl.constexpr):
    """Return one of RANKS flags."""
    return tl.max(tl.where(tl.arange(0, RANKS) == rank, flags.to(tl.int32), 0), axis=0) > 0


@triton.jit
def num_peers(flags, RANK: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Return how many flags of peers are set."""
    ranks = tl.arange(0, RANKS)
    return tl.sum(tl.where((ranks < SIZE) & (ranks != RANK), flags.to(tl.int32), 0), axis=0)


@triton.jit
def raise_flags(
    addresses_ptr, program, max_rows, epoch, comes, KIND: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Raise the flags at all peers; all threads of the program have written.

    comes: for each of RANKS, a power of two, whether a row was sent.
    """
    peers = tl.arange(0, RANKS)
    is_peer = (peers < SIZE) & (peers != RANK)
    flags = tl.load(addresses_ptr + peers, mask=is_peer, other=0).to(tl.pointer_type(tl.int32))
    flags += (KIND * SIZE + RANK) * max_rows + program
    tl.atomic_xchg(flags, 2 * epoch + comes.to(tl.int32), mask=is_peer, sem="release", scope="sys")


@triton.jit
def take_row(
    addresses_ptr, sender, program, columns, inside, n, max_rows, inbox_at, epoch, DTYPE: tl.constexpr,
    KIND: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Wait for a peer's flag, then read the row in this rank's inbox; zeros if none was sent."""
    flag = flag_of(addresses_ptr, RANK, sender, program, max_rows, KIND, SIZE)
    came = (wait_for_flag(flag, 2 * epoch, COMPILED) & 1) == 1
    inbox = memory_of(addresses_ptr, RANK, inbox_at, DTYPE)
    at = inbox + (sender * max_rows + program) * n + columns
    return tl.load(at, mask=inside & came, other=0.0, cache_modifier=".cv")
