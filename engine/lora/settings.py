"""Settings of LoRA adapters in an engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import check_positive, require, setting
from common.lora.modules import parse_lora_modules
from engine.wings import EngineWing

NO_REMOTE_STAGE = "--enable-lora with --stage-address is not supported: both hosts would have to hold the adapters"
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
            ("stage_address",): NO_REMOTE_STAGE, ("kv_cache_dtype",): NO_FP8, ("simulated_steps",): NO_STEPS,
            ("model_impl",): NO_FOREIGN,
            (
                "expert_parallel", "expert_load_file", "expert_placement", "expert_rebalance_interval",
            ): NO_EXPERTS,
        },
    )  # fmt: skip
    max_loras: int = setting(
        8, "adapters that stay in memory, on a GPU also those of one step; the least recently used one leaves first"
    )
    max_lora_rank: int = setting(64, "largest rank of an adapter")
    lora_target_modules: str = setting(
        "", "modules that adapters may change: q_proj,v_proj; empty: all that they can. Others keep their faster form"
    )
    lora_modules: str = setting(
        "", "LoRA adapters that are read at the start, NAME=FOLDER each, or as vLLM's JSON objects", many=True,
    )  # fmt: skip

    @property
    def num_graph_sets(self) -> int:
        """See EngineWing: steps with and without adapters have separate graphs."""
        return 2 if self.enable_lora else 1

    @property
    def num_prompt_graph_sets(self) -> int:
        """See EngineWing."""
        return self.num_graph_sets

    def __post_init__(self) -> None:
        check_positive(self, "max_loras", "max_lora_rank")
        parse_lora_modules(self.lora_modules)  # raises ConfigError
        require(self.enable_lora or not self.lora_target_modules, "--lora-target-modules needs --enable-lora")
        require(self.enable_lora or not self.lora_modules, "--lora-modules needs --enable-lora")
