"""Maps a GGUF file's tensors to the Hugging Face names of weights.

All experts are one tensor; so are Phi-3's q, k and v, and its gate and up. Each such weight is some rows of the
stored tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from engine.layers.weights import CHOICE_BIAS
from engine.loader.checkpoint import Shape
from engine.models.config import ModelConfig

OUTPUT_WEIGHT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NO_WEIGHTS = (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    OUTPUT_WEIGHT: "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_WHOLE_NAMES = {
    "exp_probs_b.bias": f"mlp.gate.{CHOICE_BIAS}",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_NAMES_OF: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "MixtralForCausalLM": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "GptOssForCausalLM": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "DeepseekV2ForCausalLM": _SHARED_EXPERTS,
    "DeepseekV3ForCausalLM": _SHARED_EXPERTS,
}
_PLAIN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_EXPERTS_OF: Mapping[str, Mapping[str, str]] = {
    "DeepseekV2ForCausalLM": _PLAIN_EXPERTS,
    "DeepseekV3ForCausalLM": _PLAIN_EXPERTS,
    "Qwen2MoeForCausalLM": _PLAIN_EXPERTS,
    "Qwen3MoeForCausalLM": _PLAIN_EXPERTS,
    "MixtralForCausalLM": {
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
}
_FUSED_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Phi3ForCausalLM": {
        "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
    }
}
_EXPERT_PATTERN = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")  # in files of early 2024
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Located:
    """A weight of `shape` as rows of the tensor `stored`, with all leading dimensions flattened."""

    stored: str
    first: int
    shape: Shape

    @property
    def rows(self) -> range:
        return range(self.first, self.first + prod(self.shape[:-1]))


def locate(name: str, shape: Shape, config: ModelConfig) -> Iterator[tuple[str, Located]]:
    """Yield the weights in a tensor; an unknown name is kept, and will be reported as unexpected."""
    match = _LAYER_PATTERN.fullmatch(name)
    names = {**_LAYER_NAMES, **_NAMES_OF.get(config.architecture, {})}
    experts = _EXPERTS_OF.get(config.architecture, {})
    fused = _FUSED_OF.get(config.architecture, {})
    if (one := _EXPERT_PATTERN.fullmatch(name)) and f"{one[2]}_exps" in experts:
        yield f"model.layers.{one[1]}.{experts[f'{one[2]}_exps'].format(one[3])}.weight", Located(name, 0, shape)
        return
    if match is None:
        if not name.startswith(tuple(_gguf_layer(unused) for unused in config.unused_weights)):
            yield _TOP_NAMES.get(name, name), Located(name, 0, shape)
        return
    layer, module, kind = f"model.layers.{match[1]}", match[2], match[3]
    if module in experts and len(shape) == 3:
        for index in range(shape[0]):
            expert = experts[module].format(index)
            yield f"{layer}.{expert}.{kind}", Located(name, index * shape[1], shape[1:])
    elif module in fused and len(shape) == 2 and shape[0] == sum(_sizes(module, config)):
        first = 0
        for part, size in zip(fused[module], _sizes(module, config), strict=True):
            yield f"{layer}.{part}.{kind}", Located(name, first, (size, shape[1]))
            first += size
    elif f"{module}.{kind}" in _WHOLE_NAMES:
        yield f"{layer}.{_WHOLE_NAMES[f'{module}.{kind}']}", Located(name, 0, shape)
    elif module == "ffn_gate_inp_shexp":  # files leave out the dimension of its one output
        yield f"{layer}.{names[module]}.{kind}", Located(name, 0, (1, shape[-1]))
    else:
        yield (f"{layer}.{names[module]}.{kind}" if module in names else name), Located(name, 0, shape)


def _gguf_layer(layer: str) -> str:
    return layer.replace("model.layers.", "blk.")


def _sizes(fused: str, config: ModelConfig) -> tuple[int, ...]:
    if fused == "attn_qkv":
        return config.q_size, config.kv_size, config.kv_size
    return config.intermediate_size, config.intermediate_size
