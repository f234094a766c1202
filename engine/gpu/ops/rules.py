"""Rules, of which the first that fits a block in a class of steps makes its op, and what ops share and are given.

Between blocks travels an output that is pending until the next block's fold adds it to the residual: a tensor, or a
form of its own, as of the kernel that quantizes what it norms (`engine/quantization/gpu_ops.py`).
`GpuSeams` is what a process computes alone; tensor and expert parallelism have others.
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
    """An output in a form of its own."""

    __slots__ = ()

    @abstractmethod
    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add it to the residual, in place. Returns the RMS norm of the sum, with `weight`."""

    @abstractmethod
    def plain(self, eps: float) -> Tensor:
        """What is added, (num_tokens, hidden)."""

    @abstractmethod
    def rows(self, index: Tensor) -> PendingOutput:
        """The output of those tokens, int64 (n,)."""


Pending = Tensor | PendingOutput
Fold = Callable[[Tensor, Pending | None], X]
"""(residual, pending) -> a block's input. The residual becomes their sum in place."""


@dataclass(frozen=True, slots=True)
class AddNorm:
    """The fold whose result is the RMS norm, in one kernel."""

    weight: Tensor
    eps: float

    def __call__(self, residual: Tensor, pending: Pending | None) -> Tensor:
        if pending is None:
            return rms_norm(residual, self.weight, self.eps)
        if isinstance(pending, Tensor):
            return add_rms_norm(pending, residual, self.weight, self.eps)
        return pending.add_norm(residual, self.weight, self.eps)


def rows_of(pending: Pending | None, index: Tensor) -> Pending | None:
    """Select tokens of an output."""
    if isinstance(pending, Tensor):
        return pending[index]
    return pending if pending is None else pending.rows(index)


def plain_of(pending: Pending | None, eps: float) -> Tensor | None:
    """What is added, (num_tokens, hidden)."""
    return pending.plain(eps) if isinstance(pending, PendingOutput) else pending


@dataclass(frozen=True, slots=True)
class Target:
    """A class of steps, and what its ops share.

    num_rows: tokens, or MANY_ROWS for more than any kernel is tuned for. workspace: of `plain.workspace_on`.
    """

    num_rows: int
    is_decode: bool  # no chunks of prompts
    seams: GpuSeams
    workspace: Any


@dataclass(slots=True)
class GpuStep:
    """The inputs of one forward pass. token_ids: (num_tokens,). slots: int32 (num_tokens,), -1 of padding.

    attend: `GpuAttention.attend`, of a block and its queries. wanted: see `GpuInputs`.
    """

    token_ids: Tensor
    slots: Tensor
    attend: Callable[..., Tensor]
    wanted: Tensor | None = None


GpuOp = Op[Any, GpuStep, Pending]
GpuForward = Forward[GpuStep, Pending]


class Rule(NamedTuple):
    """A row of the table: `op` makes the op of a block of its kind that it `fits`. The last of each kind always does.

    way: rules of one way go together, so that all blocks of a model take one of them, or none does.
    """

    kind: type[Any]
    op: Callable[[Any, Target], GpuOp]
    fits: Callable[[Any, Target], bool] = lambda block, target: True
    way: str = ""


class Vocabulary:
    """The tokens whose logits a process has: here all of them. See `VocabShards` for ranks that have parts."""

    def own(self, logits: Tensor) -> tuple[int, int]:
        """How many columns of `logits` are of tokens, and the id of the first one."""
        return logits.shape[1], 0

    def joined(self, stats: Tensor, logits: Tensor, truncates: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Statistics (rows, chunks, 4) and logits of the whole vocabulary; logits of rows with `truncates` alone."""
        return stats, logits

    def gathered(self, logits: Tensor) -> Tensor:
        """Logits (rows, vocab) of rows of which each rank has its part."""
        return logits

    def whole(self, logits: Tensor, sources: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Logits over the whole vocabulary in which rows `sources` of `logits` are, and which rows they are there."""
        return logits, sources


WHOLE_VOCABULARY = Vocabulary()


class GpuSeams:
    """What a rank computes with others on a GPU; this one is alone."""

    is_alone = True
    vocabulary: Vocabulary = WHOLE_VOCABULARY
    """That of its logits."""
    rules: Sequence[Rule] = ()
    """Before all others."""

    @property
    def add_norm_quantize(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """What adds, norms and quantizes outputs that are a rank's share of a sum; None: they are whole."""
        return None

    def forward(self, model: Model, ops: Sequence[GpuOp]) -> GpuForward:
        """The ops between embedding and head."""
        final, (norm, first) = self.fold(model.final_norm, model.config.rms_norm_eps), ops[0]
        if not model.takes_rows_as_they_are or not isinstance(norm, AddNorm):
            return Forward(lambda step: Stream(model.embed(step.token_ids)), ops, final, model.head)

        def start(step: GpuStep) -> Stream[Pending]:
            """The first norm and the embedding's rows are one kernel."""
            residual, x = embed_rms_norm(step.token_ids, model.embedding, norm.weight, norm.eps)
            return Stream(residual, first(x, step))

        return Forward(start, ops[1:], final, model.head)

    def fold(self, weight: Tensor, eps: float) -> Fold[Tensor]:
        """The RMS norm of the residual, with all that is pending."""
        return AddNorm(weight, eps)

    def sum(self, model: Model) -> Fold[Tensor]:
        """The residual with what is pending added, without a norm: where a stage ends."""
        return lambda residual, pending: plain_sum(residual, plain_of(pending, model.config.rms_norm_eps))


SINGLE_GPU = RankContext(GpuSeams())


class BlockOps(Protocol):
    """The module that `Block.gpu_ops` names. attention: how its blocks attend, if they do.

    prepare: brings a block's weights into the form that ops read, in place, as there is no room for both.
    """

    RULES: Sequence[Rule]
    prepare: Callable[[Any], None]
    attention: type[GpuAttention]


def ops_of(block: Block) -> BlockOps:
    """Import the module of ops that a block names."""
    return cast(BlockOps, import_module(block.gpu_ops))


def fitting(block: Block, rules: Sequence[Rule], target: Target) -> list[Rule]:
    """Return the rules that fit the block, its module's last. Raises UnsupportedModelError if there are none."""
    of_block = ops_of(block).RULES if block.gpu_ops else ()
    found = [rule for rule in (*rules, *of_block) if isinstance(block, rule.kind) and rule.fits(block, target)]
    if not found:
        raise UnsupportedModelError(f"{type(block).__name__} blocks have no GPU kernels yet: use --device cpu")
    return found
