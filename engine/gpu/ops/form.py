"""What GPU ops are chosen for, what they are given in a step, and what all forms share."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from common.errors import UnsupportedModelError
from engine.gpu.attention.backend import GpuAttention
from engine.layers.attention import Attention
from engine.layers.block import Block
from engine.layers.forward import AddNorm, Body, Forward, Op, Stream
from engine.layers.mlp import GeluMlp, Mlp
from engine.layers.post_norm import PostNormed
from engine.models.model import Model
from engine.moe.moe import Moe
from kernels.gpu.elementwise.post_norm import post_norm_add_norm
from kernels.gpu.elementwise.rms_norm import add_rms_norm, add_rms_norm_of_partials, embed_rms_norm, rms_norm
from kernels.gpu.gemm.split_k import SplitKWorkspace

MANY_ROWS = sys.maxsize
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Target:
    """A class of steps. num_rows: tokens, or MANY_ROWS for more than any kernel is tuned for."""

    num_rows: int
    is_decode: bool  # no chunks of prompts


@dataclass(slots=True)
class GpuStep:
    """The inputs of one forward pass. token_ids: (num_tokens,). slots: int32 (num_tokens,), -1 of padding.

    attend: `GpuAttention.attend`, of a block and its queries.
    """

    token_ids: Tensor
    slots: Tensor
    attend: Callable[..., Tensor]


GpuOp = Op[GpuStep]
GpuBody = Body[Tensor, GpuStep]


class Form(ABC):
    """One form of all blocks of a model, over its weights."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @abstractmethod
    def takes(self, target: Target) -> bool:
        """Whether it is the form of such steps, if none before it is."""

    @abstractmethod
    def lower(self, target: Target) -> Forward[GpuStep]: ...


class BlockOps(Protocol):
    """What the module that `Block.gpu_ops` names has."""

    attention: type[GpuAttention]

    def plain(self, block: Any, num_rows: int, workspace: SplitKWorkspace) -> GpuBody:
        """The block's body for any number of rows, see `engine/gpu/ops/plain.py`."""
        ...

    def one_row(self, block: Any) -> GpuOp:
        """The block for one decode row, see `engine/gpu/ops/one_row.py`."""
        ...


def ops_of(block: Block) -> BlockOps:
    """Those of a block that brings its own. Raises UnsupportedModelError."""
    if not block.gpu_ops:
        raise UnsupportedModelError(f"{type(block).__name__} blocks have no such GPU kernels yet: use --device cpu")
    return cast(BlockOps, import_module(block.gpu_ops))


def by_kind(
    block: Block,
    attention: Callable[[Attention], Made],
    mlp: Callable[[Mlp], Made],
    moe: Callable[[Moe], Made] | None = None,
    other: Callable[[Block], Made] | None = None,
) -> Made:
    """What one of them makes of the block. Raises UnsupportedModelError for blocks of other kinds."""
    if isinstance(block, Attention):
        return attention(block)
    if isinstance(block, Mlp):
        return mlp(block)
    if isinstance(block, Moe) and moe is not None:
        return moe(block)
    if other is not None:
        return other(block)
    raise UnsupportedModelError(f"{type(block).__name__} blocks have no such GPU kernels yet: use --device cpu")


def is_plain_alone(model: Model) -> bool:
    """Whether the model has blocks, or an embedding, that `PlainForm` and mostly `OneRowForm` alone take."""
    kinds = Moe, PostNormed, GeluMlp
    return model.embedding_scale is not None or any(isinstance(each, kinds) or each.gpu_ops for each in model.blocks)


def post_norms(model: Model) -> list[Tensor | None]:
    """The norm that is pending with each fold's output: of the block before, and of none before the first."""
    return [None, *(block.post_norm if isinstance(block, PostNormed) else None for block in model.blocks)]


def add_norm(weight: Tensor, eps: float, post_norm: Tensor | None = None) -> AddNorm[Tensor]:
    """In one kernel. What is pending is plain, or partial sums (num_parts, num_tokens, hidden).

    post_norm: of what is pending, before it is added; then that is plain.
    """

    def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
        if pending is None:
            return rms_norm(residual, weight, eps)
        if post_norm is not None:
            return post_norm_add_norm(pending, post_norm, residual, weight, eps)
        if pending.dim() == 3:
            return add_rms_norm_of_partials(pending, residual, weight, eps)
        return add_rms_norm(pending, residual, weight, eps)

    return fold


def final_norm(model: Model) -> AddNorm[Tensor]:
    return add_norm(model.final_norm, model.config.rms_norm_eps, post_norms(model)[-1])


def embed(model: Model) -> Callable[[GpuStep], Stream]:
    """Start with the embedding's rows."""
    return lambda step: Stream(model.embed(step.token_ids))


def embed_then(model: Model, first: GpuBody) -> Callable[[GpuStep], Stream]:
    """Start with the first block's output pending: its norm and the embedding's rows are one kernel."""
    norm, eps = model.blocks[0].norm, model.blocks[0].eps

    def start(step: GpuStep) -> Stream:
        residual, x = embed_rms_norm(step.token_ids, model.embedding, norm, eps)
        return Stream(residual, first(x, step))

    return start
