"""Settings of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class PoolingSettings:
    pooling: str = setting(
        "last",
        "what a vector of a text is made of: its last token's hidden state, or the mean of all",
        choices=("last", "mean"),
    )
