"""A model on a CPU whose layers add the adapters of a step's rows.

The base layer computes all rows at once, then each adapter the rows that name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from engine.cpu.batch import StepBatch
from engine.cpu.forward import CpuForward
from engine.cpu_forms.forms import FormsByRows, Rows, lower_model, with_linears_for
from engine.layers.linear import Linear
from engine.lora.reader import AdapterWeights, LowRank
from engine.models.model import Model
from engine.ranks import RankContext, Seams


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """An adapter as CPU layers read it, see AdapterWeights. embedding: a is (vocab, rank)."""

    linears: tuple[LowRank | None, ...]
    embedding: LowRank | None

    @classmethod
    def of(cls, weights: AdapterWeights) -> CpuAdapter:
        # Not in oneDNN's order: it saves 3 us of the 15 to 60 that a GEMM of few rows takes, but costs 80 of 110 ms
        # when an adapter of rank 16 of an 8B model is read.
        embedding = weights.embedding
        if embedding is not None:
            embedding = LowRank(embedding.a.T.contiguous(), embedding.b)
        return cls(weights.linears, embedding)


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a step, grouped by adapter.

    parts: each adapter, and its slice of the rows `gathered`, of at least two rows: the library sums up the products
    of a single row in another order. gathered: rows of x, sorted by adapter; None: all, of one adapter. added: rows
    of the output to add to. kept: which of the gathered rows are added; None: all.
    """

    parts: Sequence[tuple[CpuAdapter, slice]]
    gathered: Tensor | None
    added: Tensor
    kept: Tensor | None

    def add(
        self, y: Tensor, x: Tensor, pair_of: Callable[[CpuAdapter], LowRank | None], is_table: bool = False
    ) -> None:
        """Add the adapters' outputs for rows of x to rows of y. The other rows keep their bits.

        is_table: x holds token ids, which select rows of A.
        """
        pairs = [(pair_of(adapter), rows) for adapter, rows in self.parts]
        if all(pair is None for pair, _ in pairs):
            return
        x = x if self.gathered is None else x.index_select(0, self.gathered)
        deltas = [
            y.new_zeros(rows.stop - rows.start, y.shape[1]) if pair is None else _delta(pair, x[rows], is_table)
            for pair, rows in pairs
        ]
        delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas)
        if self.gathered is None:
            y += delta
            return
        if self.kept is not None:
            delta = delta.index_select(0, self.kept)
        y.index_add_(0, self.added, delta.to(y.dtype))


def _delta(pair: LowRank, x: Tensor, is_table: bool) -> Tensor:
    inner = pair.a[x] if is_table else functional.linear(x.to(pair.a.dtype), pair.a)
    return functional.linear(inner, pair.b)


@dataclass(slots=True)
class AdapterRows:
    """The current step's rows by adapter. head: the same for the hidden states that are sampled from. None: no
    adapters.
    """

    groups: Groups | None = None
    head: Groups | None = None


def groups_of(adapters: Iterable[tuple[CpuAdapter | None, range]], num_rows: int) -> Groups | None:
    """Gather rows by adapter. adapters: of all ranges of rows, in order; None: no adapter."""
    found: dict[int, tuple[CpuAdapter, list[int]]] = {}
    for adapter, rows in adapters:
        if adapter is not None:
            found.setdefault(id(adapter), (adapter, []))[1].extend(rows)
    if not found:
        return None
    parts: list[tuple[CpuAdapter, slice]] = []
    gathered: list[int] = []
    kept: list[int] = []
    for adapter, own in found.values():
        first = len(gathered)
        kept += range(first, first + len(own))
        gathered += own if len(own) > 1 else own * 2
        parts.append((adapter, slice(first, len(gathered))))
    if len(parts) == 1 and len(kept) == num_rows > 1:
        return Groups(parts, None, torch.tensor(gathered), None)
    added = torch.tensor([gathered[index] for index in kept])
    return Groups(parts, torch.tensor(gathered), added, None if len(kept) == len(gathered) else torch.tensor(kept))


class AdaptedForwards(FormsByRows):
    """The model lowered for each class of steps, without adapters and with them. Weights are shared."""

    def __init__(self, model: Model, rows: AdapterRows, ranks: RankContext[Seams], batch_invariant: bool) -> None:
        super().__init__(model, ranks, batch_invariant)
        self._rows = rows
        models = {kind: with_adapters(with_linears_for(model, kind, batch_invariant), rows) for kind in Rows}
        self._adapted = {kind: lower_model(adapted, kind, ranks) for kind, adapted in models.items()}

    def change(self, change: Callable[[CpuForward], CpuForward]) -> None:
        """See CpuForwards."""
        super().change(change)
        self._adapted = {rows: change(form) for rows, form in self._adapted.items()}

    def choose(self, batch: StepBatch) -> CpuForward:
        """See CpuForwards."""
        adapters = [request.adapter_weights for request in batch.requests]
        ranges = [range(*ends) for ends in pairwise(batch.query_starts)]
        self._rows.groups = groups_of(zip(adapters, ranges, strict=True), batch.num_tokens)
        self._rows.head = None  # log-probabilities of prompts are asked for without adapters of the head
        forms = self._by_rows if self._rows.groups is None else self._adapted
        return forms[self.rows_of(batch)]


@dataclass(slots=True)
class AdaptedModel(Model):
    """A model whose embedding may have adapters."""

    rows: AdapterRows = field(default_factory=AdapterRows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See Model."""
        x = Model.embed(self, token_ids)
        if (groups := self.rows.groups) is not None:
            groups.add(x, token_ids, lambda adapter: adapter.embedding, is_table=True)
        return x


def with_adapters(model: Model, rows: AdapterRows) -> Model:
    """Return the model with layers that add the adapters of `rows`, with shared weights."""
    values = {each.name: getattr(model, each.name) for each in fields(Model)}
    adapted = AdaptedModel(**values, rows=rows)
    adapted.blocks = [block.copy() for block in model.blocks]
    refs = list(adapted.linears())
    for index, ref in enumerate(refs):
        ref.replace(_adapted(ref.layer, index, rows, is_head=index == len(refs) - 1))
    return adapted


def _adapted(base: Linear, index: int, rows: AdapterRows, is_head: bool) -> Linear:
    """Return the layer plus its adapters. index: among all linear layers."""

    def gemm(_: Linear, x: Tensor) -> Tensor:
        y = base(x)
        groups = rows.head if is_head else rows.groups
        if groups is not None:
            groups.add(y, x, lambda adapter: adapter.linears[index])
        return y

    return Linear(base.weight, gemm=gemm)
