"""Settings that only a GPU has."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from common.errors import ConfigError
from engine.config import EngineConfig


@dataclass(frozen=True)
class GpuConfig:
    """GPU settings; without effect on a CPU. Raises ConfigError for values that cannot work."""

    use_cuda_graph: bool = setting(True, "replay decode steps as CUDA graphs")
    overlap: bool = setting(True, "plan a step while the one before runs")
    attention_backend: str = setting(
        "auto", "prefill attention; auto: fa3 (package fa3-fwd) where it is installed, then cudnn, then triton",
        choices=("auto", "triton", "fa3", "cudnn"),
    )  # fmt: skip
    gpu_memory_fraction: float = setting(
        0.9, "share of the GPU's memory for weights and KV blocks together", flags=("--gpu-memory-utilization",)
    )

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_fraction <= 1.0:
            raise ConfigError("--gpu-memory-fraction must be in (0, 1]")


def returns_tokens(config: EngineConfig, gpu: GpuConfig) -> bool:
    """Whether the first stage of a pipeline gets sampled tokens from the last one's GPU.

    Drafts need them on the host, and those of another host are out of reach.
    """
    return config.pp > 1 and gpu.overlap and not config.stage_address and not config.num_speculative_tokens
