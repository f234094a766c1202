"""Which op stands for each block in a step on a GPU: by the first rule that fits, once per class of steps, then kept.

A step of the same class runs the same list of ops, and so the same kernels in the same order: nothing is looked up or
compared per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Protocol

from torch import Tensor

from common.wings import has_wing
from engine.gpu.attention.backend import GpuInputs
from engine.gpu.ops import plain
from engine.gpu.ops.rules import (
    MANY_ROWS,
    SINGLE_GPU,
    GpuForward,
    GpuSeams,
    GpuStep,
    Pending,
    Rule,
    Target,
    fitting,
    ops_of,
    rows_of,
)
from engine.layers.block import Block
from engine.layers.forward import Stream
from engine.models.model import Model
from engine.ranks import RankContext

MAX_TUNED_ROWS = 64  # the kernels of more rows are the same for any number of them
NARROW_STEP = 64
RULES: Sequence[Rule] = plain.RULES
if has_wing("engine.few_rows"):
    from engine.few_rows import one_row, split_k

    RULES = (*split_k.RULES, *one_row.RULES, *RULES)
HAS_QUANTIZED = has_wing("engine.quantization")
if HAS_QUANTIZED:
    from engine.quantization import gpu_ops as quantized

    RULES = (*quantized.RULES, *RULES)


def narrowed_rows(num_rows: int) -> int:
    """Rows of the last layer and of the head in a step with prompts, of which `num_rows` are sampled.

    cuBLAS loads a kernel when a number of rows first makes it choose that one, and a load waits for all that the
    device has been given. So the numbers are few, and the warm-up has them all.
    """
    return max(-(-num_rows // NARROW_STEP) * NARROW_STEP, MAX_TUNED_ROWS + NARROW_STEP)


class Observer(Protocol):
    """Reads what layers make of a step's tokens, on the device.

    layers: in front of which the residual is read; their number: after all.
    """

    layers: Sequence[int]

    def watch(self, forward: GpuForward, model: Model) -> GpuForward:
        """Return the pass over `model` with what copies the residual somewhere in it."""
        ...

    def take(self, inputs: GpuInputs, sampled: Tensor, last: Tensor | None, lengths: Tensor | None) -> None:
        """Take the tokens that were sampled in a step, int64 (n,): negative where there is none.

        last: int64 (n,), the tokens of the step that these follow; None: all of them. Others are followed by the next
        one of the step, which after a chunk of a prompt is another row's. lengths: 0 for those of nobody.
        """
        ...


class GpuForwards:
    """A model's lowered forms, by class of steps."""

    def __init__(self, model: Model, ranks: RankContext[GpuSeams] = SINGLE_GPU) -> None:
        self._model, self._ranks = model, ranks
        self._workspace = plain.workspace_on(model.embedding.device)
        self._max_quantized_rows = quantized.max_quantized_rows(model) if HAS_QUANTIZED else 0
        self._lowered = cache(self._lower)
        self.logits = model.head  # normed hidden states (rows, hidden) -> (rows, vocab), of this rank
        self.observer: Observer | None = None
        for block in (each.inner for each in model.blocks):
            if block.gpu_ops:
                ops_of(block).prepare(block)

    def show(self, observer: Observer) -> None:
        """Let `observer` read what it wants from now on."""
        self.observer = observer
        self._lowered.cache_clear()

    def choose(self, num_tokens: int, is_decode: bool) -> GpuForward:
        """is_decode: no chunks of prompts."""
        if num_tokens > MAX_TUNED_ROWS:
            num_tokens = self._max_quantized_rows if num_tokens <= self._max_quantized_rows else MANY_ROWS
        return self._lowered(num_tokens, is_decode)

    def narrows(self, num_tokens: int, is_decode: bool) -> bool:
        """Whether the step gives hidden states of `GpuStep.wanted` alone. Few tokens would leave kernels too few."""
        is_seen = self.observer is not None and self._model.config.num_layers in self.observer.layers
        is_whole = self._ranks.passes_on or is_decode or is_seen
        return self._ranks.seams.is_alone and not is_whole and num_tokens > MAX_TUNED_ROWS

    def _lower(self, num_rows: int, is_decode: bool) -> GpuForward:
        seams, blocks = self._ranks.seams, self._model.blocks
        target = Target(num_rows, is_decode, seams, self._workspace)
        rules = [fitting(block, (*seams.rules, *RULES), target) for block in blocks]
        ways = set.intersection(*({rule.way for rule in each} for each in rules))
        ops = [
            next(rule for rule in each if rule.way in ways).op(block, target)
            for block, each in zip(blocks, rules, strict=True)
        ]
        forward = seams.forward(self._model, ops)
        if self.observer is not None:
            forward = self.observer.watch(forward, self._model)
        if self._ranks.passes_on:
            return forward.ended_by(seams.sum(self._model))
        if self.narrows(num_rows, is_decode):
            return forward.narrowed(num_free_blocks(blocks), wanted_rows)
        return forward


def num_free_blocks(blocks: Sequence[Block]) -> int:
    """How many blocks at the end can do without tokens that nobody wants hidden states of."""
    return len(list(takewhile(lambda block: not block.inner.needs_all_tokens, reversed(blocks))))


def wanted_rows(stream: Stream[Pending], step: GpuStep) -> Stream[Pending]:
    """Select the tokens whose hidden states a step wants: the last MLP is spared all others."""
    if step.wanted is None:
        return stream
    return Stream(stream.residual[step.wanted], rows_of(stream.pending, step.wanted))
