"""The forward pass of steps on a CPU: here all steps run the blocks that the model's family yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.cpu.batch import StepBatch
from engine.layers.block import Step
from engine.layers.forward import Forward, plain
from engine.models.model import Model
from engine.plan import ScheduledRow
from engine.ranks import SINGLE, RankContext, Seams
from engine.request_states import RequestState

CpuForward = Forward[Step, Tensor]


class CpuForwards:
    """One forward pass for all steps. `engine/cpu_forms` has one for each class of steps."""

    def __init__(self, model: Model, ranks: RankContext[Seams] = SINGLE) -> None:
        self._form = ranks.seams.lowered(plain(model), model)

    def passes(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> list[list[int]]:
        """Divide a step into forward passes: return the row indices of each."""
        return [list(range(len(rows)))] if rows else []

    def choose(self, batch: StepBatch) -> CpuForward:
        """Return the model for one forward pass."""
        return self._form

    def change(self, change: Callable[[CpuForward], CpuForward]) -> None:
        """Replace the forward pass by what `change` makes of it."""
        self._form = change(self._form)
