"""Settings of models that run by transformers' code."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from engine.wings import EngineWing

OWN = "auto", "mini-infer"
ONE_CPU = (
    "--model-impl transformers runs in one process on a CPU, with weights and KV as the checkpoint has them: leave "
    "--device cuda, --tp, --pp, --quant-mode and --kv-cache-dtype out"
)
NO_EXPERTS = (
    "--model-impl transformers leaves experts to transformers' code: leave --expert-parallel, --expert-load-file, "
    "--expert-placement and --expert-rebalance-interval out"
)
COMPUTES = "--simulated-steps computes nothing, by no model's code: leave --model-impl transformers out"


@dataclass(frozen=True)
class TransformersSettings(EngineWing):
    model_impl: str = setting(
        "auto", "whose code computes the model; auto: our own where there is one, else that of transformers",
        choices=(*OWN, "transformers"), off=OWN,
        excludes={
            ("device", "tp", "pp", "quant_mode", "kv_cache_dtype"): ONE_CPU,
            (
                "expert_parallel", "expert_load_file", "expert_placement", "expert_rebalance_interval",
            ): NO_EXPERTS,
            ("simulated_steps",): COMPUTES,
        },
    )  # fmt: skip
