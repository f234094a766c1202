"""Dispatch and combine: a row goes to the ranks that have its experts, which send partial sums back.

Plain torch over a group's all-to-all; on GPUs `kernels/gpu/expert_parallel/expert_dispatch.py` and
`expert_combine.py`. Three forms of one path:

    padded    every row goes to every rank, whose experts compute all rows, with a share of 0 if not chosen
    packed    a row goes only to the ranks of its experts, which compute as in the padded form
    grouped   as packed, and an expert computes only the rows that chose it

Grouped is used; the other forms are for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from engine.moe.moe import Moe
from engine.tensor_parallel.seams import Group


class ExchangeForm(Enum):
    """The form of an exchange, see above."""

    PADDED = "padded"
    PACKED = "packed"
    GROUPED = "grouped"


@dataclass(slots=True)
class MovedBytes:
    """Bytes that a rank has sent to others since its start: rows, and 8 bytes for each dispatched choice."""

    dispatched: int = 0
    combined: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """Rows that a rank has received, in the order of source ranks.

    x: (num_received, hidden). shares: float32, chosen: int64, (num_received, top_k); -1: another rank's expert.
    counts: rows from each rank. own_rows, own_counts: which of this rank's rows went to each rank, and how many.
    """

    x: Tensor
    shares: Tensor
    chosen: Tensor
    counts: list[int]
    own_rows: Tensor
    own_counts: list[int]


class ExpertExchange:
    """The exchange between ranks with equally many expert slots each, in order; a row's choices are slots."""

    def __init__(self, group: Group, num_slots: int, form: ExchangeForm = ExchangeForm.GROUPED) -> None:
        self._group, self._form = group, form
        self._num_held = num_slots // group.size
        self.moved = MovedBytes()

    def output(self, block: Moe, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Return what the block adds to this rank's rows x (num_rows[rank], hidden). num_rows: of each rank."""
        shares, chosen = block.route(x)
        received = self.dispatch(x, shares, chosen, num_rows)
        partial = self.experts_output(block, received)
        out = self.combine(partial.to(x.dtype), received, x.shape[0])
        block.add_shared_output_(out, x)
        return out.to(x.dtype)

    def experts_output(self, block: Moe, received: Received) -> Tensor:
        """Compute a partial sum for each received row, float32 (num_received, hidden)."""
        shares, chosen = received.shares, received.chosen
        if self._form is not ExchangeForm.GROUPED:
            shares, chosen = choose_all(shares, chosen, self._held())
        return block.chosen_output(received.x, shares, chosen)

    def dispatch(self, x: Tensor, shares: Tensor, chosen: Tensor, num_rows: Sequence[int]) -> Received:
        """Send this rank's rows x (n, hidden), with shares float32 and chosen (n, top_k). num_rows: of each rank."""
        group, (n, hidden), top_k = self._group, x.shape, chosen.shape[1]
        goes = torch.full((n, group.size), self._form is ExchangeForm.PADDED)
        goes.scatter_(1, chosen // self._num_held, True)
        own_counts: list[int] = goes.sum(dim=0).tolist()
        own_rows = goes.t().nonzero()[:, 1]
        counts = list(num_rows)
        if self._form is not ExchangeForm.PADDED:
            ones = [1] * group.size
            counts = group.all_to_all(torch.tensor(own_counts)[:, None], ones, ones).flatten().tolist()
        parts = (x, chosen.to(torch.int32), shares)
        packets = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)[own_rows]
        self.moved.dispatched += self._bytes_to_others(packets, own_counts)
        came = group.all_to_all(packets, own_counts, counts)
        sizes = [hidden * x.itemsize, 4 * top_k, 4 * top_k]
        rows, choices, weights = (part.contiguous() for part in torch.split(came, sizes, dim=1))
        held, choices = self._held(), choices.view(torch.int32).long()
        is_held = (choices >= held.start) & (choices < held.stop)
        return Received(
            rows.view(x.dtype), weights.view(torch.float32), choices.where(is_held, -1), counts, own_rows, own_counts
        )

    def combine(self, partial: Tensor, received: Received, num_own: int) -> Tensor:
        """Send all partial sums back and sum up those of this rank's rows, float32 (num_own, hidden)."""
        self.moved.combined += self._bytes_to_others(partial, received.counts)
        back = self._group.all_to_all(partial, received.counts, received.own_counts)
        out = torch.zeros(num_own, partial.shape[1], dtype=torch.float32)
        return out.index_add_(0, received.own_rows, back.float())

    def _held(self) -> range:
        first = self._group.rank * self._num_held
        return range(first, first + self._num_held)

    def _bytes_to_others(self, rows: Tensor, counts: Sequence[int]) -> int:
        return (sum(counts) - counts[self._group.rank]) * rows.shape[1] * rows.itemsize


def choose_all(shares: Tensor, chosen: Tensor, held: range) -> tuple[Tensor, Tensor]:
    """Return shares and choices (num_rows, len(held)) of every expert for every row, with share 0 if not chosen."""
    experts = torch.arange(held.start, held.stop, dtype=chosen.dtype, device=chosen.device)
    matches = chosen[:, :, None] == experts
    return (matches * shares[:, :, None]).sum(dim=1), experts.expand(chosen.shape[0], -1).contiguous()


def ideal_bytes(chosen: Sequence[Tensor], rank: int, num_slots: int, row_bytes: int) -> MovedBytes:
    """Return the least bytes that a rank has to send: each row once to every other rank with one of its experts, and
    back.

    chosen: slots (rows, top_k) of each rank. row_bytes: of a hidden state.
    """
    size, top_k = len(chosen), chosen[0].shape[1]

    def num_rows(origin: int, destination: int) -> int:
        goes = chosen[origin] // (num_slots // size) == destination
        return 0 if origin == destination else int(goes.any(dim=1).sum())

    dispatched, combined = (
        sum(num_rows(*pair) for pair in zip(origins, destinations, strict=True))
        for origins, destinations in (([rank] * size, range(size)), (range(size), [rank] * size))
    )
    return MovedBytes(dispatched * (row_bytes + 8 * top_k), combined * row_bytes)
