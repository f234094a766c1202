"""Tiny random models of families that are not ours, written by transformers, and its `generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 97
WINDOW = 11
NUM_LAYERS = 2
HALF_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENTS = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {
    **EXPERTS, **LATENTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class HfFamily:
    """type: `model_type` of its config. changes: to SHAPE. kv_heads: whether the config has their number."""

    type: str
    changes: dict[str, Any] = field(default_factory=dict)
    kv_heads: bool = True

    def build(self) -> transformers.PreTrainedModel:
        torch.manual_seed(1)
        shape = {key: value for key, value in SHAPE.items() if self.kv_heads or key != "num_key_value_heads"}
        config = transformers.AutoConfig.for_model(self.type, **{**shape, **self.changes})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and name.endswith("weight")
                parameter.normal_(1.0 if is_norm else 0.0, 0.2)
        return model

    def save(self, path: Path, model: transformers.PreTrainedModel | None = None) -> Path:
        """Save the model. model: made by `build`."""
        (model or self.build()).save_pretrained(path)
        return path


OWN_HEADS = False
HEADS = {"num_key_value_heads": 4}
FAMILIES = {
    "arcee": HfFamily("arcee"),
    "apertus": HfFamily("apertus"),
    "biogpt": HfFamily("biogpt", kv_heads=OWN_HEADS),
    "bitnet": HfFamily("bitnet"),
    "cohere": HfFamily("cohere", {"logit_scale": 0.4}),
    "cohere2": HfFamily("cohere2", HALF_WINDOWS),
    "ctrl": HfFamily("ctrl", {"dff": 40}, OWN_HEADS),
    "deepseek_v3": HfFamily("deepseek_v3", {**HEADS, **DEEPSEEK}),
    "dots1": HfFamily("dots1", {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    "ernie4_5": HfFamily("ernie4_5"),
    "exaone4": HfFamily("exaone4", HALF_WINDOWS),
    "gemma": HfFamily("gemma", {"head_dim": 10}),
    "gemma2": HfFamily(
        "gemma2", {**HALF_WINDOWS, "head_dim": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "glm": HfFamily("glm", {"head_dim": 12}),
    "glm4": HfFamily("glm4", {"head_dim": 12}),
    "gpt_oss": HfFamily(
        "gpt_oss", {**HALF_WINDOWS, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "gpt2": HfFamily("gpt2", {"n_inner": 40}, OWN_HEADS),
    "gpt_bigcode": HfFamily("gpt_bigcode", {"n_inner": 40, "multi_query": True}, OWN_HEADS),
    "gpt_neox": HfFamily("gpt_neox", kv_heads=OWN_HEADS),
    "granite": HfFamily("granite", SCALES),
    "granite_swa": HfFamily("granite_swa", {**SCALES, **HALF_WINDOWS}),
    "granitemoe": HfFamily("granitemoe", {**SCALES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": HfFamily("helium", {"head_dim": 12}),
    "hunyuan_v1_dense": HfFamily("hunyuan_v1_dense", {"head_dim": 12}),
    "minicpm3": HfFamily(
        "minicpm3",
        {**HEADS, **LATENTS},
    ),
    "nemotron": HfFamily("nemotron"),
    "olmo": HfFamily("olmo", {"clip_qkv": 2.0}),
    "olmo2": HfFamily("olmo2"),
    "olmo3": HfFamily("olmo3", HALF_WINDOWS),
    "olmoe": HfFamily("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": HfFamily("opt", {"ffn_dim": 40, "word_embed_proj_dim": 48}, OWN_HEADS),
    "persimmon": HfFamily("persimmon", kv_heads=OWN_HEADS),
    "phi": HfFamily("phi"),
    "seed_oss": HfFamily("seed_oss", {"head_dim": 12}),
    "smollm3": HfFamily("smollm3", {"no_rope_layers": [1, 0]}),
    "stablelm": HfFamily("stablelm", {"partial_rotary_factor": 0.5}),
    "starcoder2": HfFamily("starcoder2", {"sliding_window": WINDOW}),
}  # fmt: skip


@torch.inference_mode()
def generated(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of `generate`, past ends of sequences."""
    model.generation_config.eos_token_id = None
    tokens = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
    )  # fmt: skip
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found
