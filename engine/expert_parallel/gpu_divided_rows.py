"""Blocks of one rank among several that divide rows around experts (docs/decisions/expert-parallelism.md).

behind attention and MLPs    sums scattered, residual, norm; rows gathered if the next block needs them: one kernel
experts                      routing of this rank's rows, dispatch, two grouped GEMMs
behind experts               combine, residual, norm, rows gathered: one kernel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.expert_parallel.exchange import ExchangeForm, choose_all
from engine.gpu.ops.form import GpuBody, GpuStep, Target
from engine.gpu.ops.plain import PlainForm, gemm
from engine.layers.forward import AddNorm, Forward, Op, Stream
from engine.layers.linear import Linear
from engine.models.model import Model
from engine.moe.gpu_experts import Gemm, StackedExperts, chooser, is_listed, outputs, router_of
from engine.moe.moe import Moe
from engine.tensor_parallel.gpu_group import DeviceGroup
from engine.tensor_parallel.gpu_ops import embed_part
from kernels.gpu.expert_parallel.divided_rows import combine_add_rms_norm, scatter_add_rms_norm
from kernels.gpu.expert_parallel.exchange_memory import ExchangeMemory, rows_a_rank
from kernels.gpu.expert_parallel.expert_combine import combine
from kernels.gpu.expert_parallel.expert_dispatch import Dispatched, dispatch


class DispatchedExperts:
    """The body of a block of experts: this rank's normed rows to what its experts make of the rows that came."""

    def __init__(
        self, block: Moe, experts: StackedExperts, plain_router: Gemm, memory: ExchangeMemory,
        form: ExchangeForm = ExchangeForm.GROUPED,
    ) -> None:  # fmt: skip
        """form: see `engine/expert_parallel/exchange.py`."""
        self._experts, self._memory, self._form = experts, memory, form
        self._router = router_of(block, experts, plain_router)
        self._choose = chooser(block, experts.num_shared, range(block.rule.num_slots))
        self._num_held = len(block.rule.held_slots)
        self.came: Dispatched | None = None  # until its outputs are combined

    def __call__(self, x: Tensor, step: GpuStep) -> Tensor:
        """Partial sums (choices, rows that may come, hidden), for a fold that combines them."""
        self.came = came = self.dispatch(x, step.token_ids.shape[0], step)
        return outputs(self._experts, came.x, came.shares, came.chosen, came.pairs)

    def dispatch(self, x: Tensor, num_tokens: int, step: GpuStep | None = None) -> Dispatched:
        """Route this rank's rows x (rows, hidden) of num_tokens, and send them to their experts.

        step: where choices are counted, which the first rank does: its rows are the first ones of the step.
        """
        shares, chosen = self._choose(self._router(x), step)
        is_grouped = self._form is ExchangeForm.GROUPED
        return dispatch(
            x, shares, chosen, num_tokens, self._num_held, self._memory,
            is_padded=self._form is ExchangeForm.PADDED,
            lists=is_grouped and is_listed(x.shape[0] * self._memory.layout.size, chosen.shape[1]),
        )  # fmt: skip

    def output(self, x: Tensor, num_tokens: int) -> Tensor:
        """What the block adds to this rank's rows, in any form."""
        came = self.dispatch(x, num_tokens)
        if self._form is ExchangeForm.GROUPED:
            parts = outputs(self._experts, came.x, came.shares, came.chosen, came.pairs)
            return combine(parts, came, self._memory)
        shares, every = choose_all(came.shares, came.chosen, range(self._num_held + self._experts.num_shared))
        parts = outputs(self._experts, came.x, shares, every)
        return combine(parts, came, self._memory, every, self._form is ExchangeForm.PADDED)


class DividedRowsForm(PlainForm):
    """Takes every step. The model has this rank's shard, with whole experts."""

    def __init__(self, model: Model, group: DeviceGroup, experts: Mapping[int, StackedExperts]) -> None:
        super().__init__(model, experts)
        assert group.rows is not None, "the model's config says that rows are dispatched"
        self._group, self._rows = group, group.rows

    def experts(self, block: Moe, num_rows: int) -> GpuBody:
        stacked, own = self._experts[id(block)], rows_a_rank(num_rows, self._group.size)
        router = gemm(Linear(stacked.router, block.router_bias), own, self._workspace)
        return DispatchedExperts(block, stacked, router, self._rows)

    def lower(self, target: Target) -> Forward[GpuStep]:
        model, bodies = self.model, self.bodies(target.num_rows)
        embed, size = embed_part(model, self._group), self._group.size

        def start(step: GpuStep) -> Stream:
            zeros, part = embed(step)
            return Stream(zeros[: rows_a_rank(zeros.shape[0], size)], part)

        ops = [
            Op(self._fold(block.norm, block.eps, before, gathers=not isinstance(block, Moe)), body)
            for block, before, body in zip(model.blocks, [None, *bodies], bodies, strict=False)
        ]
        final = self._fold(model.final_norm, model.config.rms_norm_eps, bodies[-1], gathers=True)
        return Forward(start, ops, final, model.head)

    def _fold(self, weight: Tensor, eps: float, before: Any, gathers: bool) -> AddNorm[Tensor]:
        """before: the body whose output is pending; None: the embedding."""
        memory = self._rows

        def fold(residual: Tensor, pending: Tensor | None) -> Tensor:
            assert pending is not None, "the stream starts with a pending output"
            if not isinstance(before, DispatchedExperts):
                return scatter_add_rms_norm(pending, residual, weight, eps, memory, gathers)
            came, before.came = before.came, None
            assert came is not None, "a body runs before its fold"
            return combine_add_rms_norm(pending, came, residual, weight, eps, memory, gathers)

        return fold
