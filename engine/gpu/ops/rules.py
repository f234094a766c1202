"""Rules, of which the first that fits a block in a class of steps makes its op, and what ops are given in a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from torch import Tensor

from common.errors import UnsupportedModelError
from engine.gpu.attention.backend import GpuAttention
from engine.gpu.ops.pending import Pending
from engine.layers.block import Block
from engine.layers.forward import Op
from kernels.gpu.gemm.split_k import SplitKWorkspace

if TYPE_CHECKING:
    from engine.gpu.lowering import GpuSeams

MANY_ROWS = sys.maxsize


@dataclass(frozen=True, slots=True)
class Target:
    """A class of steps, and what its ops share.

    num_rows: tokens, or MANY_ROWS for more than any kernel is tuned for. workspace: serves one stream.
    """

    num_rows: int
    is_decode: bool  # no chunks of prompts
    seams: GpuSeams
    workspace: SplitKWorkspace


@dataclass(slots=True)
class GpuStep:
    """The inputs of one forward pass. token_ids: (num_tokens,). slots: int32 (num_tokens,), -1 of padding.

    attend: `GpuAttention.attend`, of a block and its queries.
    """

    token_ids: Tensor
    slots: Tensor
    attend: Callable[..., Tensor]


GpuOp = Op[Any, GpuStep, Pending]


class Rule(NamedTuple):
    """A row of the table: `op` makes the op of a block of its kind that it `fits`. The last of each kind always does.

    way: rules of one way go together, so that all blocks of a model take one of them, or none does.
    """

    kind: type[Any]
    op: Callable[[Any, Target], GpuOp]
    fits: Callable[[Any, Target], bool] = lambda block, target: True
    way: str = ""


class BlockOps(Protocol):
    """The module that `Block.gpu_ops` names. attention: how its blocks attend, if they do."""

    RULES: Sequence[Rule]
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
