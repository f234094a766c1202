"""Settings of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import require, setting
from engine.wings import EngineWing


@dataclass(frozen=True)
class SpeculationSettings(EngineWing):
    num_speculative_tokens: int = setting(
        0, "draft tokens per sequence and step, accepted when equal to the sampled ones; 0: none"
    )
    ngram_max: int = setting(4, "longest n-gram of a sequence's last tokens whose earlier occurrence proposes drafts")
    ngram_min: int = setting(2, "shortest such n-gram")

    def __post_init__(self) -> None:
        require(
            0 <= self.num_speculative_tokens <= 64,
            f"--num-speculative-tokens {self.num_speculative_tokens}: choose 1 to 64, or 0 for none",
        )
        require(
            1 <= self.ngram_min <= self.ngram_max,
            f"--ngram-min {self.ngram_min} --ngram-max {self.ngram_max}: choose 1 or more, the smaller one for min",
        )

    @property
    def needs_known_tokens(self) -> bool:
        """See EngineWing: drafts follow them."""
        return self.num_speculative_tokens > 0
