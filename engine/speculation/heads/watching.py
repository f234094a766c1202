"""A forward pass that shows the residual that enters given layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from engine.cpu.forward import CpuForward
from engine.layers.attention import AttentionBlock
from engine.layers.forward import Forward, Stream
from engine.models.model import Model

X = TypeVar("X")
S = TypeVar("S")
P = TypeVar("P")
See = Callable[[int, Tensor], object]


class Residuals:
    """Keeps the residuals that enter `layers`, which are in rising order, of passes on a CPU."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._seen: dict[int, Tensor] = {}

    def watch(self, model: Model, forward: CpuForward) -> CpuForward:
        """See Proposer."""
        return watched(forward, model, self._layers, self._keep)

    def take(self) -> list[Tensor]:
        """Return the residuals of the last pass, float32 (num_tokens, hidden) each."""
        return [self._seen.pop(number) for number in range(len(self._layers))]

    def _keep(self, number: int, residual: Tensor) -> None:
        self._seen[number] = residual.clone()


def watched(forward: Forward[S, P], model: Model, layers: Sequence[int], see: See) -> Forward[S, P]:
    """Return a forward pass over `model` that calls `see` with the residual that enters each of these layers.

    `see` gets the index in `layers`, the first one of a layer that occurs twice. The number of layers stands for the
    end of the model. The residual includes the pending output. It changes later, so the caller copies it if needed.
    """
    seen = {
        index: partial(see, layers.index(block.inner.layer))
        for index, block in enumerate(model.blocks)
        if isinstance(block.inner, AttentionBlock) and block.inner.layer in layers
    }
    if (num_layers := model.config.num_layers) in layers:
        seen[len(model.blocks)] = partial(see, layers.index(num_layers))
    num_fused = len(model.blocks) - len(forward.ops)  # blocks that `start` computes
    start, ops, final = forward.start, list(forward.ops), forward.final
    for index, read in seen.items():
        if index < num_fused:
            start = _seen_start(start, read)
        elif index == len(model.blocks):
            final = _seen(final, read)
        else:
            op = ops[index - num_fused]
            ops[index - num_fused] = op._replace(fold=_seen(op.fold, read))
    return replace(forward, start=start, ops=ops, final=final)


def _seen_start(start: Callable[[S], Stream[P]], read: Callable[[Tensor], object]) -> Callable[[S], Stream[P]]:
    def seen_start(step: S) -> Stream[P]:
        stream = start(step)
        read(stream.residual)  # the embedding: the first op's output is still pending
        return stream

    return seen_start


def _seen(fold: Callable[[Tensor, P | None], X], read: Callable[[Tensor], object]) -> Callable[[Tensor, P | None], X]:
    def seen_fold(residual: Tensor, pending: P | None) -> X:
        x = fold(residual, pending)
        read(residual)  # `fold` has added `pending` in place
        return x

    return seen_fold
