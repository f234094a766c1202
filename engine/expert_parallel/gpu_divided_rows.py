"""Blocks of one rank among several that divide rows around experts (docs/decisions/expert-parallelism.md).

after attention and MLPs     reduce-scatter, residual, norm; an all-gather if the next block needs it: one kernel
experts                      routing of this rank's rows, dispatch, two grouped GEMMs
after experts                combine, residual, norm, all-gather: one kernel
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.expert_parallel.exchange import ExchangeForm, choose_all
from engine.few_rows.partials import Partials
from engine.gpu.ops import plain
from engine.gpu.ops.rules import Fold, GpuOp, GpuStep, Pending, Rule, Target
from engine.layers.forward import Op, Stream
from engine.layers.linear import Linear
from engine.models.model import Model
from engine.moe.expert_stacks import StackedExperts, stacked_of
from engine.moe.gpu_experts import Gemm, chooser, is_listed, outputs, router_of
from engine.moe.moe import Moe
from engine.tensor_parallel.gpu_group import DeviceGroup
from engine.tensor_parallel.gpu_ops import ITS_SHARE, ShardSeams
from kernels.gpu.expert_parallel.divided_rows import combine_add_rms_norm, scatter_add_rms_norm
from kernels.gpu.expert_parallel.exchange_memory import ExchangeMemory, rows_a_rank
from kernels.gpu.expert_parallel.expert_combine import combine
from kernels.gpu.expert_parallel.expert_dispatch import Dispatched, dispatch


@dataclass(frozen=True, slots=True)
class Uncombined(Partials):
    """Partial sums (choices, received rows, hidden), which are to be sent back to the rows' ranks."""

    came: Dispatched


class DispatchedExperts:
    """The body of a block of experts: dispatches normed rows and computes this rank's experts for received rows."""

    def __init__(
        self, block: Moe, experts: StackedExperts, plain_router: Gemm, memory: ExchangeMemory,
        form: ExchangeForm = ExchangeForm.GROUPED,
    ) -> None:  # fmt: skip
        """form: see `engine/expert_parallel/exchange.py`."""
        self._experts, self._memory, self._form = experts, memory, form
        self._router = router_of(block, experts, plain_router)
        self._choose = chooser(block, experts.num_shared, range(block.rule.num_slots))
        self._num_held = len(block.rule.held_slots)

    def __call__(self, x: Tensor, step: GpuStep) -> Uncombined:
        came = self.dispatch(x, step.token_ids.shape[0], step)
        return Uncombined(outputs(self._experts, came.x, came.shares, came.chosen, came.pairs), came)

    def dispatch(self, x: Tensor, num_tokens: int, step: GpuStep | None = None) -> Dispatched:
        """Route this rank's rows x (rows, hidden), out of num_tokens, and send them to their experts.

        step: if choices are counted, which the first rank does, since its rows are the first ones of the step.
        """
        shares, chosen = self._choose(self._router(x), step)
        is_grouped = self._form is ExchangeForm.GROUPED
        return dispatch(
            x, shares, chosen, num_tokens, self._num_held, self._memory,
            is_padded=self._form is ExchangeForm.PADDED,
            lists=is_grouped and is_listed(x.shape[0] * self._memory.layout.size),
        )  # fmt: skip

    def output(self, x: Tensor, num_tokens: int) -> Tensor:
        """Compute what the block adds to this rank's rows, in any form."""
        came = self.dispatch(x, num_tokens)
        if self._form is ExchangeForm.GROUPED:
            parts = outputs(self._experts, came.x, came.shares, came.chosen, came.pairs)
            return combine(parts, came, self._memory)
        shares, every = choose_all(came.shares, came.chosen, range(self._num_held + self._experts.num_shared))
        parts = outputs(self._experts, came.x, shares, every)
        return combine(parts, came, self._memory, every, self._form is ExchangeForm.PADDED)


class DividedSeams(ShardSeams):
    """Seams of a rank with whole experts and a shard of all other layers, which divides rows."""

    def __init__(self, group: DeviceGroup, vocab_size: int) -> None:
        super().__init__(group, vocab_size)
        assert group.rows is not None, "the model's config says that rows are dispatched"
        self._rows = group.rows
        self.rules = Rule(Moe, self._experts), *plain.RULES

    def start(self, model: Model) -> Callable[[GpuStep], Stream[Pending]]:
        embed, size = super().start(model), self.group.size

        def start(step: GpuStep) -> Stream[Pending]:
            stream = embed(step)
            return Stream(stream.residual[: rows_a_rank(stream.residual.shape[0], size)], stream.pending)

        return start

    def fold(self, weight: Tensor, eps: float, gathers: bool = True) -> Fold[Tensor]:
        """Return the fold of a block. gathers: it returns all ranks' normed rows."""
        memory = self._rows

        def fold(residual: Tensor, pending: Pending | None) -> Tensor:
            if isinstance(pending, Uncombined):
                return combine_add_rms_norm(
                    pending.values, pending.came, residual, weight, eps, memory, gathers
                )  # fmt: skip
            assert isinstance(pending, Tensor), ITS_SHARE
            return scatter_add_rms_norm(pending, residual, weight, eps, memory, gathers)

        return fold

    def _experts(self, block: Moe, target: Target) -> GpuOp:
        stacked, own = stacked_of(block), rows_a_rank(target.num_rows, self.group.size)
        router = plain.gemm(Linear(stacked.router, block.router_bias), own, target.workspace)
        fold = self.fold(block.norm, block.eps, gathers=False)
        return Op(fold, DispatchedExperts(block, stacked, router, self._rows))
