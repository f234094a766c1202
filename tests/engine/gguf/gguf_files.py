"""Writes tiny GGUF files as llama.cpp's converter lays them out, from transformers' state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(middle)]}.{kind}"


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Halves of each head to pairs, row by row: the converter's order for Llama."""
    rows = weight.shape[0] // num_heads
    order = [
        head * rows + half * rows // 2 + pair
        for head in range(num_heads)
        for pair in range(rows // 2)
        for half in (0, 1)
    ]
    return weight[order]


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Random blocks of a type the package cannot quantize to; its float16 scales are made small."""
    byte_shape = gguf.quant_shape_to_byte_shape(shape, kind)
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, byte_shape, dtype=np.uint8)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    scale_at = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82)}[kind.name]
    for offset in scale_at:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    return raw


def write_gguf(
    path: Path, model: transformers.PreTrainedModel, arch: str, kind: str = "F32", extra: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """Write `model`, matrices as `kind`. Returns what the file really holds, under transformers' names."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
    writer.add_eos_token_id(config.eos_token_id)
    held: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        held[name] = _write_tensor(writer, name, tensor, config, arch == "llama", kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
    return held


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: Any, permute: bool, kind: str
) -> Tensor:
    num_heads = 0
    if permute and ".q_proj." in name:
        num_heads = config.num_attention_heads
    elif permute and ".k_proj." in name:
        num_heads = config.num_key_value_heads
    stored = interleave(tensor, num_heads) if num_heads else tensor
    values = stored.float().numpy()
    quantization = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
    try:
        raw = gguf.quantize(values, quantization)
    except NotImplementedError:
        raw = random_blocks(quantization, values.shape)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=quantization)
    read_back = torch.from_numpy(np.array(gguf.dequantize(raw, quantization), dtype=np.float32)).view(tensor.shape)
    if not num_heads:
        return read_back
    restored = torch.empty_like(read_back)
    restored[interleave(torch.arange(tensor.shape[0]), num_heads)] = read_back
    return restored
