"""Tiny random models of each family, written by transformers, and transformers' own answers for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB_SIZE = 211
EOS = 3
CHOICE_BIAS = "e_score_correction_bias"  # the one buffer that checkpoints hold
WINGS = {
    "deepseek": "engine.mla",
    **dict.fromkeys(("gemma3", "gpt-oss", "mistral-window", "qwen2-moe-windows"), "engine.windows"),
    **dict.fromkeys(("mixtral", "qwen2-moe", "qwen3-moe"), "engine.moe"),
    "phi3": "engine.fused",
    **dict.fromkeys(("qwen2", "qwen3"), "engine.qwen"),
    **dict.fromkeys(("llama-rope", "gemma3-scaled", "phi3-long", "phi3-short"), "engine.rope_scaling"),
}
CONFIGS = {"Gemma3": "Gemma3Text"}  # classes of configs that have another name than the model's
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    family: str  # as transformers' classes are named
    changes: dict[str, Any] = field(default_factory=dict)
    shard_bytes: int = 0

    def build(self) -> transformers.PreTrainedModel:
        torch.manual_seed(1)
        kind = CONFIGS.get(self.family, self.family)
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **self.changes})
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{self.family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                center = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.normal_(center, 0.15)  # biases and norms too: at their defaults they would test nothing
            for name, buffer in model.named_buffers():
                if name.endswith(CHOICE_BIAS):
                    buffer.normal_(0.0, 0.15)
        return model

    def save(self, path: Path, model: transformers.PreTrainedModel | None = None) -> Path:
        """Save the model. model: made by `build`."""
        (model or self.build()).save_pretrained(path, max_shard_size=self.shard_bytes or "1GB")
        return path


def with_wing(name: str) -> Any:
    """Make the name of a model a test's parameter, marked with the wing that the model needs."""
    return pytest.param(
        name, marks=[pytest.mark.wing(wing) for start, wing in WINGS.items() if name.startswith(start)]
    )


def edit_config(path: Path, **changes: Any) -> dict[str, Any]:
    """Change fields of a saved model's config; None: leave one out. Returns it as it was."""
    before: dict[str, Any] = json.loads((path / "config.json").read_text())
    after = {name: value for name, value in {**before, **changes}.items() if value is not None or name not in changes}
    (path / "config.json").write_text(json.dumps(after))
    return before


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """`change` changes the dict of a saved model's tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3_ROPE = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
DEEPSEEK = {
    "num_key_value_heads": 6, "rms_norm_eps": 1e-6, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_ROPE = rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.9, original_max_position_embeddings=64)
GEMMA3 = {
    "num_hidden_layers": 7, "head_dim": 12, "sliding_window": 21, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "query_pre_attn_scalar": 12,
}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
GPT_OSS = {
    "num_hidden_layers": 4, "head_dim": 12, "sliding_window": 21, "num_local_experts": 6, "num_experts_per_tok": 4,
    "intermediate_size": 32, "swiglu_limit": 0.5, **rope("yarn", factor=4.0, truncate=False,
    original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0),
}  # fmt: skip
# Longer than its original context of one token is all that tells the two sets of factors apart.
PHI3_LONG = rope(
    "longrope", partial_rotary_factor=0.75, long_factor=[1.5, 4.0, 9.0], short_factor=[1.0, 1.1, 1.3],
    original_max_position_embeddings=1, attention_factor=1.19,
)  # fmt: skip
PHI3_SHORT = rope(
    "longrope", partial_rotary_factor=0.5, long_factor=[2.0, 5.0], short_factor=[1.2, 1.6],
    original_max_position_embeddings=256, factor=4.0,
)  # fmt: skip
QWEN2_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
}  # fmt: skip
QWEN3_EXPERTS = {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
TINY_MODELS = {
    "llama": TinyModel("Llama"),
    "llama-tied-sharded": TinyModel("Llama", {"tie_word_embeddings": True}, shard_bytes=30_000),
    "llama-biases": TinyModel("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": TinyModel("Llama", {"head_dim": 16, "num_key_value_heads": 6}),
    "llama-rope-linear": TinyModel("Llama", rope("linear", factor=3.0)),
    "llama-rope-llama3": TinyModel("Llama", LLAMA3_ROPE),
    "llama-rope-yarn": TinyModel("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": TinyModel("Mistral", {"sliding_window": None}),
    "gemma3": TinyModel("Gemma3", GEMMA3),
    "gemma3-scaled": TinyModel(
        "Gemma3", {**GEMMA3, "query_pre_attn_scalar": 7, "num_hidden_layers": 6, "rope_parameters": GEMMA3_ROPE}
    ),
    "gpt-oss": TinyModel("GptOss", GPT_OSS),
    "mistral-window": TinyModel("Mistral", {"sliding_window": 21}),
    "phi3": TinyModel("Phi3"),
    "phi3-long-sharded": TinyModel("Phi3", {"tie_word_embeddings": True, **PHI3_LONG}, shard_bytes=30_000),
    "phi3-short": TinyModel("Phi3", {"original_max_position_embeddings": 256, **PHI3_SHORT}),
    "qwen2": TinyModel("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied-sharded": TinyModel("Qwen2", shard_bytes=30_000),
    "qwen2-moe": TinyModel("Qwen2Moe", QWEN2_EXPERTS),
    "qwen2-moe-windows": TinyModel(
        "Qwen2Moe",
        {
            **QWEN2_EXPERTS,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "qkv_bias": False,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 3,
        },
    ),
    "qwen3": TinyModel("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-biases": TinyModel("Qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3-moe": TinyModel("Qwen3Moe", {**QWEN3_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": TinyModel(
        "Qwen3Moe", {**QWEN3_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    ),
    "deepseek-v2-lite": TinyModel("DeepseekV2", {**DEEPSEEK, **DEEPSEEK_ROPE}),
    "deepseek-v2": TinyModel(
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": TinyModel(
        "DeepseekV3", {**DEEPSEEK, **DEEPSEEK_ROPE, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}
    ),
    "mixtral": TinyModel("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
# The others differ in things (rotary tables, biases, windows, choice of experts, splitting of files) that are not
# divided among ranks, or one of these has it, too.
UNLIKE_WHEN_DIVIDED = sorted(
    TINY_MODELS.keys()
    - {"gemma3-scaled", "llama-rope-linear", "llama-rope-llama3", "llama-rope-yarn", "mistral", "mistral-window"}
    - {"phi3", "phi3-short", "qwen2-untied-sharded", "qwen3-biases", "deepseek-v2", "mixtral", "qwen2-moe"}
)


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Return logits (len(token_ids), vocab) of transformers."""
    return model(torch.tensor([token_ids])).logits[0]


def reference_greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Return greedy tokens by full recompute, without a cache."""
    return reference_answers(model, [prompt], num_tokens)[0]


@torch.inference_mode()
def reference_answers(
    model: transformers.PreTrainedModel, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """Return greedy tokens after each prompt, by full recompute of all together.

    Padding follows the tokens, so that a causal model needs no mask to ignore it.
    """
    rows, ends = torch.arange(len(prompts)), torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.ones(len(prompts), int(ends.max()) + num_tokens, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for num_known in range(num_tokens):
        logits = model(tokens[:, : int(ends.max()) + num_known], use_cache=False).logits
        tokens[rows, ends + num_known] = logits[rows, ends + num_known - 1].argmax(-1)
    return [row[end : end + num_tokens].tolist() for row, end in zip(tokens, ends.tolist(), strict=True)]
