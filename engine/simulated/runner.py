"""A runner that computes nothing: steps last as long as a cost model says, and sample random tokens.

Everything around it is real: scheduler, KV blocks, transfers, router. So policies and clusters of GPUs can be tried
where there is no GPU (`--simulated-steps`). Sampling depends on seed and position alone: a request that moves to
another worker keeps its tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.config import EngineConfig
from engine.cpu.runner import CpuRunner
from engine.loader.load import LoadedModel
from engine.plan import StepPlan, StepResult, StepSize
from engine.request_states import RequestState
from engine.simulated.settings import SimulationSettings
from engine.simulated.step_cost import SimulatedCost
from engine.wings import OnProgress, no_progress

NOISE = 0.97, 1.06  # of a duration, uniform


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that ends at a moment, of time.monotonic()."""

    found: StepResult
    end: float

    def result(self) -> StepResult:
        time.sleep(max(self.end - time.monotonic(), 0.0))
        return self.found


class SimulatedRunner(CpuRunner):
    """Two steps are in flight, as on a GPU: one begins when the one before has ended."""

    max_steps_in_flight = 2

    def __init__(
        self, loaded: LoadedModel, kv_pool: Tensor, host_buffer: Tensor | None, config: EngineConfig
    ) -> None:
        super().__init__(loaded, kv_pool, host_buffer, config)
        self.attention_backend = "none"
        self._cost = SimulatedCost.parse(config.of(SimulationSettings).simulated_steps)
        self._vocab_size = loaded.config.vocab_size
        self._ends = frozenset(loaded.config.eos_token_ids)
        self._random = random.Random(0)
        self._end = 0.0  # of the last step

    def _launch(self, plan: StepPlan, requests: Sequence[RequestState]) -> SimulatedStep:
        self._copy(plan)
        size = StepSize.of(plan.rows)
        seconds = self._cost.seconds(size.num_decode_tokens, size.num_prompt_tokens, size.context, size.pairs)
        self._end = max(self._end, time.monotonic()) + seconds * self._random.uniform(*NOISE)
        return SimulatedStep(self._sampled(plan, requests), self._end)

    def warmup(self, on_progress: OnProgress = no_progress) -> None:
        """See CpuRunner: there are no kernels to compile."""

    def _sampled(self, plan: StepPlan, requests: Sequence[RequestState]) -> StepResult:
        result = StepResult.of_rows(len(plan.rows))
        for index, (row, request) in enumerate(zip(plan.rows, requests, strict=True)):
            if not row.samples:
                continue
            params = request.params
            is_plain = params.logprobs is None and params.prompt_logprobs is None
            if not is_plain or params.grammar or params.pooling:
                result.errors[index] = "simulated steps have neither log-probabilities nor vectors nor grammars"
                continue
            token_id = self._token(params.seed or 0, row.stop)
            request.put_token(row.stop, token_id)
            result.token_ids[index].append(token_id)
        return result

    def _token(self, seed: int, position: int) -> int:
        draw = random.Random(seed << 32 | position)
        while (token_id := draw.randrange(self._vocab_size)) in self._ends:
            pass
        return token_id
