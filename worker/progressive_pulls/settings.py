"""Settings of pulls of prompts that are still being computed."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class ProgressivePullSettings:
    progressive_pull: bool = setting(
        True, "prefill: hand a prompt's KV over chunk by chunk, while the rest of the prompt is computed"
    )
