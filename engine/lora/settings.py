"""Settings of LoRA adapters in an engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_positive, require, setting
from common.lora.modules import parse_lora_modules
from engine.wings import EngineWing

NO_STAGES = "--enable-lora with --pp is not supported yet: use --tp"
NO_GPU = "--enable-lora is for CPUs so far: leave --device cuda out, or merge the adapter into the model's weights"
NO_FP8 = (
    "--enable-lora with --kv-cache-dtype fp8 is not supported: its scales are folded into the model's own weights"
)
NO_FOREIGN = "--enable-lora with --model-impl transformers is not supported: adapters change our own layers alone"
NO_EXPERTS = "--enable-lora with experts that are divided, counted or placed is not supported: use --tp alone"
NO_STEPS = "--enable-lora with --simulated-steps is not supported: simulated steps compute nothing"


@dataclass(frozen=True)
class LoraSettings(EngineWing):
    enable_lora: bool = setting(
        False, "serve LoRA adapters, in PEFT's format (--lora-modules, POST /v1/load_lora_adapter)",
        excludes={
            ("pp",): NO_STAGES, ("device",): NO_GPU, ("kv_cache_dtype",): NO_FP8, ("simulated_steps",): NO_STEPS,
            ("model_impl",): NO_FOREIGN,
            (
                "expert_parallel", "expert_load_file", "expert_placement", "expert_rebalance_interval",
            ): NO_EXPERTS,
        },
    )  # fmt: skip
    max_loras: int = setting(8, "adapters that stay in memory; the one whose last use is longest ago leaves first")
    max_lora_rank: int = setting(64, "largest rank of an adapter")
    lora_modules: str = setting(
        "", "LoRA adapters that are read at the start, NAME=FOLDER each, or as vLLM's JSON objects", many=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_positive(self, "max_loras", "max_lora_rank")
        parse_lora_modules(self.lora_modules)  # raises ConfigError
        require(self.enable_lora or not self.lora_modules, "--lora-modules needs --enable-lora")
