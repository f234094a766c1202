"""Choose a GPU op for each block of the model: the first rule that fits, once per class of steps.

Steps of one class run the same list of ops, so the same kernels in the same order. Nothing is looked up per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    """Pad the sampled rows of a step with prompts, for the last layer and the head.

    cuBLAS loads a kernel the first time a row count selects it, and loading waits for all queued work. So there are
    few different counts, and the warm-up runs each of them.
    """
    return max(-(-num_rows // NARROW_STEP) * NARROW_STEP, MAX_TUNED_ROWS + NARROW_STEP)


class Observer(Protocol):
    """Reads hidden states of a step on the device.

    layers: indices of the layers before which it reads the residual; the number of layers means after the last one.
    """

    layers: Sequence[int]

    def watch(self, forward: GpuForward, model: Model) -> GpuForward:
        """Return `forward` with ops that copy the residual where the observer wants it."""
        ...

    def take(self, inputs: GpuInputs, sampled: Tensor, last: Tensor | None, lengths: Tensor | None) -> None:
        """Take the tokens that a step sampled, int64 (n,); negative entries are padding.

        last: int64 (n,), indices of the step's tokens that the sampled ones follow; None: of all tokens. Any other
        token of the step is followed by the step's next one, which after a prompt chunk belongs to another row.
        lengths: 0 for padding.
        """
        ...


class GpuForwards:
    """The lowered forms of a model, one per class of steps."""

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
        """Let `observer` read hidden states of all later steps."""
        self.observer = observer
        self._lowered.cache_clear()

    def choose(self, num_tokens: int, is_decode: bool) -> GpuForward:
        """Return the form for a step. is_decode: it has no prompt chunks."""
        if num_tokens > MAX_TUNED_ROWS:
            num_tokens = self._max_quantized_rows if num_tokens <= self._max_quantized_rows else MANY_ROWS
        return self._lowered(num_tokens, is_decode)

    def narrows(self, num_tokens: int, is_decode: bool) -> bool:
        """Whether the step computes its last layers only for `GpuStep.wanted`. With few tokens that saves nothing."""
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
            return replace(forward, final=seams.sum(self._model))
        if self.narrows(num_rows, is_decode):
            return forward.narrowed(num_free_blocks(blocks), wanted_rows)
        return forward


def num_free_blocks(blocks: Sequence[Block]) -> int:
    """Count the blocks at the end that can skip tokens whose hidden states are not wanted."""
    return len(list(takewhile(lambda block: not block.inner.needs_all_tokens, reversed(blocks))))


def wanted_rows(stream: Stream[Pending], step: GpuStep) -> Stream[Pending]:
    """Select the tokens whose hidden states a step wants, so that the last MLP skips all others."""
    if step.wanted is None:
        return stream
    return Stream(stream.residual[step.wanted], rows_of(stream.pending, step.wanted))
