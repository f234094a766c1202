"""What simulated steps take: `common/step_times.py`, with one more part, which is not linear.

`weights` is the time to read them, which the GEMMs of steps with prompts hide, and decode rows are then multiplied as
long as prompt tokens are. With it, steps that have nothing but prompts take `base`, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.errors import ConfigError
from common.step_times import StepCost


@dataclass(frozen=True)
class SimulatedCost(StepCost):
    """Seconds for each part of a step."""

    weights: float = 0.0  # of `base`

    @classmethod
    def parse(cls, text: str) -> SimulatedCost:
        """Read `base=0.0043,prompt_token=2e-5`: seconds for parts of it. Raises ConfigError."""
        names = [field.name for field in fields(cls) if field.name != "spread"]
        parts: dict[str, float] = {}
        for item in text.split(","):
            name, _, value = item.partition("=")
            try:
                parts[name.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"{item!r}: a step's parts are given as NAME=SECONDS") from None
        if not parts.keys() <= set(names) or any(not 0.0 <= value < 60.0 for value in parts.values()):
            raise ConfigError(f"{text!r}: a step's parts are {', '.join(names)}, of 0 to 60 seconds")
        return cls(**parts)

    def seconds(
        self, num_rows: float, num_prompt_tokens: float = 0.0, context: float = 0.0, pairs: float = 0.0
    ) -> float:
        if not (self.weights and num_prompt_tokens):
            return super().seconds(num_rows, num_prompt_tokens, context, pairs)
        decode = super().seconds(num_rows, context=context) or self.base
        gemms = max(self.prompt_token * (num_rows + num_prompt_tokens), self.weights) - self.weights
        return decode + self.prompt + self.prompt_context * pairs + gemms
