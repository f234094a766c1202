"""Common part of all runners with adapters: a step's requests get their adapters before its rows are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from common.errors import ConfigError
from engine.engine import DeviceLostError
from engine.lora.store import AdapterStore
from engine.plan import CompletedStep, PendingStep, StepPlan, StepResult
from engine.request_states import RequestState

if TYPE_CHECKING:
    from engine.runner import ModelRunner as Base
else:
    Base = object


class AdaptedSteps(Base):
    """Mixin for a device's runner. Rows whose adapter cannot be read fail; the step's other rows are computed."""

    _adapters: AdapterStore[Any]
    _is_alone: bool  # otherwise other ranks compute parts of the same rows

    def _launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> PendingStep:
        errors = self._take_adapters(requests)
        if not errors:
            return super()._launch(plan, requests)  # type: ignore[safe-super]  # the device's runner comes next
        others = [index for index in range(len(requests)) if index not in errors]
        step = super()._launch(  # type: ignore[safe-super]
            msgspec.structs.replace(plan, rows=[plan.rows[i] for i in others]), [requests[i] for i in others]
        )
        result = StepResult.of_rows(len(requests))
        result.put(others, step.result())
        result.errors |= errors
        return CompletedStep(result)

    def _take_adapters(self, requests: Sequence[RequestState]) -> dict[int, str]:
        """Give requests the adapters that they name. Returns the errors of adapters that cannot be read.

        Raises DeviceLostError if there are several ranks, which would wait for the row's share.
        """
        errors = {}
        for index, request in enumerate(requests):
            if request.adapter and request.adapter_weights is None:
                try:
                    request.adapter_weights = self._adapters.get(request.adapter)
                except ConfigError as error:
                    if not self._is_alone:
                        raise DeviceLostError(f"a rank cannot read an adapter: {error}") from error
                    errors[index] = str(error)
        return errors
