"""Settings of `serve` for the ranks of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import require, setting


@dataclass(frozen=True)
class RankSettings:
    prefill_tp: int = setting(0, "--tp of prefill workers, where it differs; 0: it does not")
    ep: int = setting(1, "N: as --tp N --expert-parallel, N ranks of a worker that have whole experts each")

    def __post_init__(self) -> None:
        require(self.prefill_tp >= 0, f"--prefill-tp {self.prefill_tp}: choose 1 or more, or 0 for --tp")
        require(self.ep >= 1, f"--ep {self.ep}: choose 1 or more")
