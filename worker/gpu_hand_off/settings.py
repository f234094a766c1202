"""Settings of hand-offs from and to GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_positive, setting


@dataclass(frozen=True)
class GpuHandOffSettings:
    kv_staging_gb: float = setting(
        1.0, "pinned host memory through which a GPU's KV travels by shm and tcp; unused on a CPU"
    )

    def __post_init__(self) -> None:
        check_positive(self, "kv_staging_gb")
