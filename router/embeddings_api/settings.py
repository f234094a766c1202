"""Settings of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting


@dataclass(frozen=True)
class PoolingSettings:
    pooling: str = setting(
        "auto",
        "what a vector of a text is made of: its last token's hidden state, the mean of all, or the first token's; "
        "auto: what the model's 1_Pooling says, else the last",
        choices=("auto", "last", "mean", "cls"),
    )
