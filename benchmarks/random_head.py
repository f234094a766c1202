"""An EAGLE-3 head of random weights in the published layout, for what one costs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models.config import ModelConfig

DRAFT_VOCAB = 32_000  # as heads for Llama 3.1 8B and Qwen3 8B have it


def write_random_head(model: ModelConfig, folder: Path) -> Path:
    """Write a head for the model, with its attention and MLP's sizes."""
    hidden, inner, draft_vocab = model.hidden_size, model.intermediate_size, min(DRAFT_VOCAB, model.vocab_size)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": 1, "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim, "intermediate_size": inner, "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings, "vocab_size": model.vocab_size,
        "draft_vocab_size": draft_vocab, "hidden_act": "silu",
    }  # fmt: skip
    shapes = {
        "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (model.q_size, 2 * hidden),
        "midlayer.self_attn.k_proj": (model.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (model.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, model.q_size), "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab, hidden), "midlayer.input_layernorm": (hidden,), "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,), "norm": (hidden,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
