"""Settings of simulated steps."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.simulated.step_cost import SimulatedCost
from engine.wings import EngineWing

ONE_GPU = "--simulated-steps takes the place of one GPU: leave --device cuda, --tp, --pp and drafts out"
NO_COUNTS = "--expert-load-file counts what steps compute, and --simulated-steps computes nothing"


@dataclass(frozen=True)
class SimulationSettings(EngineWing):
    simulated_steps: str = setting(
        "", "compute nothing: steps last as long as this says and sample random tokens (policies without GPUs); "
        "seconds for the parts of a step: base=0.0043,row=3e-6,context=14e-9,prompt=5e-4,prompt_token=2e-5",
        excludes={
            ("device", "tp", "pp", "num_speculative_tokens"): ONE_GPU,
            ("expert_load_file",): NO_COUNTS,
        },
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.simulated_steps:
            SimulatedCost.parse(self.simulated_steps)  # raises ConfigError

    @property
    def is_simulated(self) -> bool:
        """See EngineWing."""
        return bool(self.simulated_steps)
