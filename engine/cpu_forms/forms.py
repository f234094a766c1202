"""Which ops stand for a model's blocks on a CPU: plain ones for prompts, ones with fewer operations for decode.

With few rows the GEMMs take half of a step and starting the other operations the rest: a row of 576 numbers is
worked through in the time that Python needs to ask for it. So there a norm is one call of C that also adds to the
residual (`kernels/native/rows.c`), and quantized weights are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import torch

from common.wings import call_wing
from engine.config import EngineConfig
from engine.cpu.batch import StepBatch
from engine.cpu.forward import CpuForward, CpuForwards
from engine.cpu_forms.rows import is_generated
from engine.cpu_forms.settings import FormSettings
from engine.cpu_gemms.gemms import half, in_threes, onednn
from engine.layers import forward
from engine.layers.block import AddNorm
from engine.layers.linear import Linear, plain, two_rows_at_least
from engine.loader.load import LoadedModel
from engine.models.model import Model
from engine.plan import ScheduledRow
from engine.ranks import SINGLE, RankContext, Seams
from engine.request import Request
from engine.request_states import RequestState
from kernels.cpu_features import has_bfloat16_gemms

MAX_FEW_ROWS = 64  # above, memory traffic counts and not the number of operations
MAX_REPLAY_TOKENS = 64  # in a row


class Rows(Enum):
    """Classes of steps, told apart by what their rows are and not only by how many.

    Prompts are always ANY, with the dense copies of quantized weights: then each of their numbers is rounded in the
    same way however they are cut into steps and however much of them is cached, bit for bit.
    """

    ANY = "prompts, alone or with generated tokens"
    FEW = f"generated tokens alone, at most {MAX_FEW_ROWS}"


class FormsByRows(CpuForwards):
    """The model lowered for each class of steps. Weights are shared."""

    def __init__(self, model: Model, ranks: RankContext[Seams] = SINGLE, batch_invariant: bool = False) -> None:
        """batch_invariant: a token's bits do not depend on the rows that share its step."""
        self.batch_invariant = batch_invariant
        models = {rows: with_linears_for(model, rows, batch_invariant) for rows in Rows}
        self._by_rows = {rows: lower_model(models[rows], rows, ranks) for rows in Rows}

    def passes(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> list[list[int]]:
        """See CpuForwards.

        Generated tokens and prompts take different forms of the model. In one pass both would take that of prompts,
        and a generated token's bits would depend on whether a prompt is in the step.
        """
        if not self.batch_invariant:
            return super().passes(rows, requests)
        generated: list[int] = []
        prompts: list[int] = []
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            (generated if is_generated(row, request) else prompts).append(index)
        return [indices for indices in (generated, prompts) if indices]

    def choose(self, batch: StepBatch) -> CpuForward:
        """See CpuForwards."""
        return self._by_rows[self.rows_of(batch)]

    def change(self, change: Callable[[CpuForward], CpuForward]) -> None:
        """See CpuForwards."""
        self._by_rows = {rows: change(form) for rows, form in self._by_rows.items()}

    def rows_of(self, batch: StepBatch) -> Rows:
        """The class of a step."""
        only_generated = all(map(is_generated, batch.rows, batch.requests))
        is_few = only_generated and (self.batch_invariant or batch.num_tokens <= MAX_FEW_ROWS)
        return Rows.FEW if is_few else Rows.ANY


def forms_by_rows(loaded: LoadedModel, config: EngineConfig, ranks: RankContext[Seams]) -> FormsByRows | None:
    """The forms of a model on a CPU; None: it is elsewhere."""
    if loaded.device.type != "cpu":
        return None
    return FormsByRows(loaded.model, ranks, config.of(FormSettings).batch_invariant)


def row_tokens(config: EngineConfig, device: torch.device) -> Callable[[Request, int], int] | None:
    """How rows are cut where answers are batch-invariant: generated tokens are computed again as decode rows."""
    return replayed_apart if config.of(FormSettings).batch_invariant and device.type == "cpu" else None


def replayed_apart(request: Request, budget: int) -> int:
    """Rows that replay generated tokens, as after a preemption, are short and have no prompt tokens."""
    num_new = min(request.num_uncomputed_tokens, budget)
    num_prompt = len(request.prompt_token_ids) - request.num_computed_tokens
    return min(num_new, num_prompt if num_prompt > 0 else MAX_REPLAY_TOKENS)


def lower_model(model: Model, rows: Rows, ranks: RankContext[Seams] = SINGLE) -> CpuForward:
    """model: of `with_linears_for` such steps."""
    form = forward.plain(model, forward.plain_norm if rows is Rows.ANY else native_norm)
    return ranks.seams.lowered(form, model)


def native_norm(weight: torch.Tensor, eps: float, dtype: torch.dtype) -> AddNorm[torch.Tensor]:
    """One call of C for a norm, where there is a compiler."""
    native: AddNorm[torch.Tensor] | None = call_wing("kernels.native.rows:add_rms_norm", weight, eps, dtype)
    return native or forward.plain_norm(weight, eps, dtype)


def with_linears_for(model: Model, rows: Rows, batch_invariant: bool) -> Model:
    """The model with the layers that such steps take. Weights are shared.

    Prompts take the dense copies of quantized layers; batch-invariant ones compute a row alike in any number of rows.
    """
    if rows is Rows.FEW and not batch_invariant:
        return model
    model = replace(model, blocks=[block.copy() for block in model.blocks])
    for ref in model.linears():
        linear = ref.layer if rows is Rows.FEW else dense(ref.layer)
        ref.replace(invariant(linear) if batch_invariant else linear)
    return model


def dense(linear: Linear) -> Linear:
    """The dense copy of a quantized layer; others as they are."""
    if linear.dense is None or linear.order is None:
        return linear.dense or linear
    return replace(linear.dense, order=linear.order)


def invariant(linear: Linear) -> Linear:
    """The layer in a form that computes a row alike in any number of rows.

    The quantized GEMMs do so by themselves, and so does FBGEMM's float16 one with AVX-512.
    """
    if linear.dense is not None:
        return replace(linear, dense=None)  # the GEMM of few rows is the same for any number
    if linear.gemm is half and not has_bfloat16_gemms():
        return Linear(linear.weight, gemm=lambda _, x: in_threes(linear, x))
    if linear.gemm in (plain, onednn):
        return Linear(linear.weight, gemm=lambda _, x: two_rows_at_least(linear, x))
    return linear
