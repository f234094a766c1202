"""A model whose layers add what the adapters of a step's rows do, on a CPU.

The layer itself is computed for all rows at once; then each adapter's part for the rows that name it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cpu.lowering import CpuForwards, Rows, lower_model, with_dense_linears, with_invariant_linears
from engine.layers.block import Step
from engine.layers.forward import Forward
from engine.layers.linear import Linear, two_rows_at_least
from engine.lora.reader import AdapterWeights
from engine.models.model import Model
from engine.ranks import RankContext, Seams


class Pair(NamedTuple):
    """See LowRank."""

    a: Linear
    b: Linear


class EmbeddingPair(NamedTuple):
    """a: (vocab, rank)."""

    a: Tensor
    b: Linear


@dataclass(frozen=True, slots=True)
class CpuAdapter:
    """An adapter as layers on a CPU read it, see AdapterWeights. dtype: of its input."""

    dtype: torch.dtype
    linears: tuple[Pair | None, ...]
    embedding: EmbeddingPair | None

    @classmethod
    def of(cls, weights: AdapterWeights, dtype: torch.dtype) -> CpuAdapter:
        # As they are: oneDNN's order saves 3 us of the 15 to 60 that a GEMM of few rows takes, and costs 80 of 110 ms
        # when an adapter of rank 16 of an 8B model is read.
        linears = [pair and Pair(Linear(pair.a), Linear(pair.b)) for pair in weights.linears]
        ends = weights.embedding
        embedding = ends and EmbeddingPair(ends.a.T.contiguous(), Linear(ends.b))
        return cls(dtype, tuple(linears), embedding)


class Group(NamedTuple):
    """Rows of one adapter. where: their indices; None: all."""

    adapter: CpuAdapter
    where: slice | Tensor | None


@dataclass(slots=True)
class AdapterRows:
    """Which tokens of the step that runs are whose. head: the same of the hidden states that are sampled from."""

    groups: list[Group] = field(default_factory=list)
    head: list[Group] = field(default_factory=list)


def groups_of(adapters: Iterable[tuple[CpuAdapter | None, range]], num_rows: int) -> list[Group]:
    """Gather rows by their adapter. adapters: of all ranges of rows, in their order; None: of no adapter."""
    found: dict[int, tuple[CpuAdapter, list[range]]] = {}
    for adapter, rows in adapters:
        if adapter is not None:
            found.setdefault(id(adapter), (adapter, []))[1].append(rows)
    return [Group(adapter, _indices(ranges, num_rows)) for adapter, ranges in found.values()]


def _indices(ranges: list[range], num_rows: int) -> slice | Tensor | None:
    first, end = ranges[0].start, ranges[-1].stop
    count = sum(map(len, ranges))
    if count == num_rows:
        return None
    if count == end - first:
        return slice(first, end)
    return torch.tensor([row for rows in ranges for row in rows])


class AdaptedForwards(CpuForwards):
    """The model lowered for each class of steps, without adapters and with them. Weights are shared."""

    def __init__(self, model: Model, rows: AdapterRows, ranks: RankContext[Seams], batch_invariant: bool) -> None:
        super().__init__(model, ranks, batch_invariant)
        self._rows = rows
        models = {kind: with_adapters(_prepared(model, kind, batch_invariant), rows) for kind in Rows}
        self._adapted = {kind: lower_model(adapted, kind, ranks) for kind, adapted in models.items()}

    def choose(self, num_tokens: int, only_decodes: bool) -> Forward[Step, Tensor]:
        if not self._rows.groups:
            return super().choose(num_tokens, only_decodes)
        return self._adapted[self.rows_of(num_tokens, only_decodes)]


def _prepared(model: Model, kind: Rows, batch_invariant: bool) -> Model:
    """The model with the layers that the lowering without adapters takes for such steps."""
    if batch_invariant:
        return with_invariant_linears(model, kind)
    return with_dense_linears(model) if kind is Rows.ANY else model


@dataclass(slots=True)
class AdaptedModel(Model):
    """A model whose embedding has adapters."""

    rows: AdapterRows = field(default_factory=AdapterRows)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See Model."""
        x = Model.embed(self, token_ids)
        for adapter, where in self.rows.groups:
            if (pair := adapter.embedding) is not None:
                _add(x, where, two_rows_at_least(pair.b, pair.a[_part(token_ids, where)]))
        return x


def with_adapters(model: Model, rows: AdapterRows) -> Model:
    """The model with layers that add what the adapters of `rows` do. Weights are shared."""
    values = {each.name: getattr(model, each.name) for each in fields(Model)}
    adapted = AdaptedModel(**values, rows=rows)
    adapted.blocks = [block.copy() for block in model.blocks]
    refs = list(adapted.linears())
    for index, ref in enumerate(refs):
        ref.replace(_adapted(ref.layer, index, rows, is_head=index == len(refs) - 1))
    return adapted


def _adapted(base: Linear, index: int, rows: AdapterRows, is_head: bool) -> Linear:
    """The layer, plus what adapters add to its output. index: among all linear layers."""

    def gemm(_: Linear, x: Tensor) -> Tensor:
        y = base(x)
        for adapter, where in rows.head if is_head else rows.groups:
            if (pair := adapter.linears[index]) is not None:
                inner = two_rows_at_least(pair.a, _part(x, where).to(adapter.dtype))
                _add(y, where, two_rows_at_least(pair.b, inner))
        return y

    return Linear(base.weight, gemm=gemm)


def _part(x: Tensor, where: slice | Tensor | None) -> Tensor:
    return x if where is None else x[where]


def _add(y: Tensor, where: slice | Tensor | None, delta: Tensor) -> None:
    """Add to some rows of y. Others keep their bits."""
    if isinstance(where, Tensor):
        y.index_add_(0, where, delta.to(y.dtype))
    else:
        _part(y, where).add_(delta)
