"""Rules that map a block to its GPU op, and the types that ops share.

A block's output stays pending until the next block's fold adds it to the residual. It is a tensor, or another form,
like the output of the kernel that norms and quantizes at once (`engine/quantization/gpu_ops.py`). `GpuSeams` is for a
single rank; tensor and expert parallelism replace it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from common.errors import UnsupportedModelError
from engine.gpu.attention.backend import GpuAttention
from engine.layers.block import Block
from engine.layers.forward import Forward, Op, Stream, plain_sum
from engine.models.model import Model
from engine.ranks import RankContext
from kernels.gpu.elementwise.rms_norm import add_rms_norm, embed_rms_norm, rms_norm

MANY_ROWS = sys.maxsize
X = TypeVar("X")


class PendingOutput(ABC):
    """A pending output that is not a plain tensor."""

    __slots__ = ()

    @abstractmethod
    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the output to the residual in place. Returns the RMS norm of the sum, with `weight`."""

    @abstractmethod
    def plain(self, eps: float) -> Tensor:
        """Return the output as a tensor (num_tokens, hidden)."""

    @abstractmethod
    def rows(self, index: Tensor) -> PendingOutput:
        """Return the output of the tokens `index`, int64 (n,)."""


Pending = Tensor | PendingOutput
Fold = Callable[[Tensor, Pending | None], X]
"""(residual, pending) -> a block's input. The residual becomes their sum in place."""


@dataclass(frozen=True, slots=True)
class AddNorm:
    """The fold that adds and applies the RMS norm in one kernel."""

    weight: Tensor
    eps: float

    def __call__(self, residual: Tensor, pending: Pending | None) -> Tensor:
        if pending is None:
            return rms_norm(residual, self.weight, self.eps)
        if isinstance(pending, Tensor):
            return add_rms_norm(pending, residual, self.weight, self.eps)
        return pending.add_norm(residual, self.weight, self.eps)


def rows_of(pending: Pending | None, index: Tensor) -> Pending | None:
    """Select tokens of a pending output."""
    if isinstance(pending, Tensor):
        return pending[index]
    return pending if pending is None else pending.rows(index)


def plain_of(pending: Pending | None, eps: float) -> Tensor | None:
    """Return a pending output as a tensor (num_tokens, hidden)."""
    return pending.plain(eps) if isinstance(pending, PendingOutput) else pending


@dataclass(frozen=True, slots=True)
class Target:
    """A class of steps, and what its ops share.

    num_rows: tokens of the step, or MANY_ROWS above all tuned counts. workspace: from `plain.workspace_on`.
    """

    num_rows: int
    is_decode: bool  # no prompt chunks
    seams: GpuSeams
    workspace: Any


@dataclass(slots=True)
class GpuStep:
    """The inputs of one forward pass. token_ids: (num_tokens,). slots: int32 (num_tokens,), -1 for padding.

    attend: `GpuAttention.attend`, which takes a block and its queries. wanted: see `GpuInputs`.
    """

    token_ids: Tensor
    slots: Tensor
    attend: Callable[..., Tensor]
    wanted: Tensor | None = None


GpuOp = Op[Any, GpuStep, Pending]
GpuForward = Forward[GpuStep, Pending]


class Rule(NamedTuple):
    """A row of the table: `op` lowers a block of type `kind` if the rule `fits`. The last of each kind always fits.

    way: rules with the same way are used by all blocks of a model or by none.
    """

    kind: type[Any]
    op: Callable[[Any, Target], GpuOp]
    fits: Callable[[Any, Target], bool] = lambda block, target: True
    way: str = ""


class Vocabulary:
    """The part of the vocabulary whose logits a process computes: here all of it. Ranks use `VocabShards`."""

    def own(self, logits: Tensor) -> tuple[int, int]:
        """Return how many columns of `logits` are tokens, not padding, and the first token id."""
        return logits.shape[1], 0

    def joined(self, stats: Tensor, logits: Tensor, truncates: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Join the ranks' statistics (rows, chunks, 4) and, for rows with `truncates`, their logits."""
        return stats, logits

    def gathered(self, logits: Tensor) -> Tensor:
        """Gather the ranks' parts of logits: (rows, vocab)."""
        return logits

    def whole(self, logits: Tensor, sources: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Return whole-vocabulary logits of rows `sources` of `logits`, and the index of each of them there."""
        return logits, sources


WHOLE_VOCABULARY = Vocabulary()


class GpuSeams:
    """Where a rank exchanges data with others on GPUs; this one is alone and exchanges nothing."""

    is_alone = True
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    """That of its logits."""
    rules: Sequence[Rule] = ()
    """Before all others."""

    @property
    def add_norm_quantize(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The kernel that all-reduces outputs, adds, norms and quantizes; None if outputs are no partial sums."""
        return None

    def forward(self, model: Model, ops: Sequence[GpuOp]) -> GpuForward:
        """Return the pass that starts with the embedding, runs `ops` and ends with the final norm."""
        final, (norm, first) = self.fold(model.final_norm, model.config.rms_norm_eps), ops[0]
        if not model.takes_rows_as_they_are or not isinstance(norm, AddNorm):
            return Forward(lambda step: Stream(model.embed(step.token_ids)), ops, final, model.head)

        def start(step: GpuStep) -> Stream[Pending]:
            """Look up the embedding and apply the first norm in one kernel."""
            residual, x = embed_rms_norm(step.token_ids, model.embedding, norm.weight, norm.eps)
            return Stream(residual, first(x, step))

        return Forward(start, ops[1:], final, model.head)

    def fold(self, weight: Tensor, eps: float) -> Fold[Tensor]:
        """Return the fold before a block: add the pending output, apply the RMS norm."""
        return AddNorm(weight, eps)

    def sum(self, model: Model) -> Fold[Tensor]:
        """Return the fold at the end of a pipeline stage: add the pending output, without a norm."""
        return lambda residual, pending: plain_sum(residual, plain_of(pending, model.config.rms_norm_eps))


SINGLE_GPU = RankContext(GpuSeams())


class BlockOps(Protocol):
    """The module that `Block.gpu_ops` names. attention: the attention class of its blocks, if they attend.

    prepare: converts a block's weights to the layout that its ops read, in place, since memory has no room for both.
    """

    RULES: Sequence[Rule]
    prepare: Callable[[Any], None]
    attention: type[GpuAttention]


def ops_of(block: Block) -> BlockOps:
    """Import the module of GPU ops that a block names."""
    return cast(BlockOps, import_module(block.gpu_ops))


def fitting(block: Block, rules: Sequence[Rule], target: Target) -> list[Rule]:
    """Return the rules that fit the block, those of its own module last. Raises UnsupportedModelError without any."""
    of_block = ops_of(block).RULES if block.gpu_ops else ()
    found = [rule for rule in (*rules, *of_block) if isinstance(block, rule.kind) and rule.fits(block, target)]
    if not found:
        raise UnsupportedModelError(f"{type(block).__name__} blocks have no GPU kernels yet: use --device cpu")
    return found
