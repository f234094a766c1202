"""Settings of one engine: the model, its form in memory, the bounds of a step; and settings for GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from common.config import Settings, check_not_negative, require, setting, with_wings
from common.errors import ConfigError


@with_wings("engine")
@dataclass(frozen=True)
class EngineConfig(Settings):
    """Engine settings. Raises ConfigError for values that cannot work."""

    model: str = setting("", "directory, .gguf file, hub id (GGUF: org/name:Q4_K_M); empty: SmolLM2-135M-Instruct")
    device: str = setting("auto", "auto takes a GPU when there is one", choices=("auto", "cpu", "cuda"), off=("cpu",))
    dtype: str = setting("auto", "auto: bfloat16", choices=("auto", "float32", "bfloat16", "float16"))
    quant_mode: str = setting(
        "auto", "weights in memory; auto: as a quantized checkpoint or GGUF file has them, else on a CPU int8-weight"
        "; int4-weight in groups of 32; fp8 and w8a8 quantize activations too and need a GPU",
        choices=("auto", "none", "int8-weight", "int4-weight", "w8a8", "fp8"), off=("none",),
    )  # fmt: skip
    block_size: int = setting(0, "tokens per KV block; 0: 16 on a CPU, 64 on a GPU")
    num_gpu_blocks: int = setting(
        0, "KV blocks; 0: from --kv-cache-gb", flags=("--num-blocks", "--num-gpu-blocks-override")
    )
    kv_cache_gb: float = setting(
        0.0, "memory for KV blocks; 0: 1 GB on a CPU, what --gpu-memory-fraction leaves on a GPU"
    )
    max_num_seqs: int = setting(0, "sequences in one step; 0: 64 on a CPU, 256 on a GPU", flags=("--max-batch-size",))
    max_num_batched_tokens: int = setting(
        0,
        "tokens in one step; 0: 256 on a CPU, 8192 on a GPU, there 16384 without services",
        flags=("--chunk-prefill-size",),
    )
    max_model_len: int = setting(0, "longest sequence; 0: what the model declares, if KV blocks hold it")
    prefix_cache: bool = setting(True, "reuse KV of equal prefixes", flags=("--enable-prefix-caching",))
    tp: int = setting(
        1, "processes, on GPUs one each, that share each layer of the model (tensor parallelism)",
        flags=("--tensor-parallel-size",),
    )  # fmt: skip
    pp: int = setting(
        1, "processes, on GPUs one each, that have consecutive layers of the model (pipeline parallelism)",
        flags=("--pipeline-parallel-size",),
    )  # fmt: skip
    stage_address: str = setting(
        "",
        "host:port of a `python -m worker.ranks.stage` on another host, which has the first of two stages (--pp 2)",
        excludes={("tp",): "--stage-address with --tp is not supported: leave one out"},
    )
    num_threads: int = setting(
        0, "CPU threads of the engine; 0: one per core, shared with busy workers of the same --run-dir"
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "num_gpu_blocks", "kv_cache_gb", "max_num_seqs", "max_model_len", "num_threads")
        require(0 <= self.block_size <= 1024, f"--block-size {self.block_size}: choose 1 to 1024, or 0 for automatic")
        require(1 <= self.tp <= 256, f"--tp {self.tp}: choose 1 to 256")
        require(1 <= self.pp <= 64, f"--pp {self.pp}: choose 1 to 64")
        require(
            not self.max_num_batched_tokens or self.max_num_batched_tokens >= self.max_num_seqs,
            f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
            "every running sequence needs a token in a step",
        )
        if stage := self.stage_address:
            require(self.pp == 2, f"--stage-address {stage} is for --pp 2: one stage there, one here")
            require(stage.rpartition(":")[2].isdecimal(), f"--stage-address {stage}: give host:port")
        self.check_together()

    @property
    def has_drafts(self) -> bool:
        """Whether rows may have draft tokens, see `EngineWing`."""
        return any(self.of(wing).has_drafts for wing in self.wings)

    @property
    def is_simulated(self) -> bool:
        """Whether steps take a GPU's time but compute nothing, see `EngineWing`."""
        return any(self.of(wing).is_simulated for wing in self.wings)

    @property
    def num_ranks(self) -> int:
        """Number of processes that run the model."""
        return self.tp * self.pp

    def resolved(self, device_type: str, is_offline: bool = False) -> EngineConfig:
        """Fill in the block size and every automatic bound of a step for `cpu` or `cuda`.

        is_offline: no client waits for the next token, so a step on a GPU may be twice as long.
        Raises ConfigError for settings that the device does not support.
        """
        on_gpu = device_type == "cuda"
        like_gpu = on_gpu or self.is_simulated
        if on_gpu and self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size {self.block_size}: on a GPU it must be a power of two")
        num_here = 1 if self.stage_address else self.num_ranks
        num_cores = len(os.sched_getaffinity(0))
        max_num_seqs = self.max_num_seqs or (256 if like_gpu else 64)
        num_tokens = (16384 if is_offline else 8192) if like_gpu else 256
        max_num_batched_tokens = self.max_num_batched_tokens or max(num_tokens, max_num_seqs)
        return replace(
            self,
            block_size=self.block_size or (64 if on_gpu else 16),
            max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_gb=self.kv_cache_gb or (0.0 if on_gpu else 1.0),
            num_threads=self.num_threads or (max(num_cores // num_here, 1) if num_here > 1 else 0),
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` pipeline stages, in the order of layers."""

    index: int
    count: int


@dataclass(frozen=True)
class GpuConfig:
    """GPU settings, which have no effect on a CPU. Raises ConfigError for values that cannot work."""

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
