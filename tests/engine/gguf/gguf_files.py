"""Writes tiny GGUF files as llama.cpp's converter lays them out, from transformers' state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from common.model_files import ModelFiles
from engine.loader.load import LoadedModel
from tests.engine.driving import open_model, random_prompt, read_prompt
from tests.engine.gguf.gguf_experts import (
    add_deepseek_fields,
    add_gpt_oss_fields,
    expert_pieces,
    gpt_oss_pieces,
    gpt_oss_weight,
    split_kv_b,
)
from tests.engine.tiny_models import VOCAB_SIZE, TinyModel

# Blocks of K-quants are 256 wide.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
Kind = gguf.GGMLQuantizationType
HALVES = {  # where a block has its float16 numbers
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,), Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
}  # fmt: skip


@cache
def name_map(arch: str) -> gguf.TensorNameMap:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[arch], 99)


def gguf_name(name: str, arch: str) -> str:
    """Map transformers' name to GGUF's with the converter's own table."""
    spelled = name.replace("_correction_bias", "_correction.bias")
    found = name_map(arch).get_name(spelled, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return f"{found}.weight" if name.endswith(".sinks") else found


def pieces(name: str, tensor: Tensor, arch: str, config: Any, is_old: bool) -> dict[str, Tensor]:
    """Return the tensors that the converter writes for one tensor, by name."""
    if ".experts." in name and arch == "gpt-oss":
        return gpt_oss_pieces(name, tensor)
    if ".experts." in name:
        return expert_pieces(name, tensor, is_old and arch == "llama")
    if name.endswith("kv_b_proj.weight") and not is_old:
        return split_kv_b(name, tensor, config)
    if name.endswith("shared_expert_gate.weight"):
        tensor = tensor.squeeze(0)
    adds_one = arch == "gemma3" and name.endswith("norm.weight")
    return {gguf_name(name, arch): tensor + 1 if adds_one else tensor}


def add_family_fields(writer: gguf.GGUFWriter, config: Any, is_old: bool) -> None:
    """Write the converter's keys for one architecture."""
    if writer.arch == "gemma3":
        add_heads(writer, config)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        if factor := config.rope_parameters["full_attention"].get("factor"):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        return
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if writer.arch == "deepseek2":
        add_deepseek_fields(writer, config, is_old)
        return
    add_heads(writer, config)
    if writer.arch == "phi3":
        head_dim = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(rope["attention_factor"])
            for length in ("long", "short"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if writer.arch == "gpt-oss":
            add_gpt_oss_fields(writer, config)
        if writer.arch in ("qwen2moe", "qwen3moe"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if writer.arch == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_heads(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder rows of each head from halves to pairs: the converter's order for Llama."""
    rows = weight.shape[0] // num_heads
    order = [
        head * rows + half * rows // 2 + pair
        for head in range(num_heads)
        for pair in range(rows // 2)
        for half in (0, 1)
    ]
    return weight[order]


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Make rows of random blocks with small scales, of any block type."""
    rng = np.random.default_rng(int(kind))
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_size, block_bytes), dtype=np.uint8)
    if kind == Kind.MXFP4:
        raw[..., 0] = rng.integers(117, 122, raw.shape[:-1])
    for at in HALVES.get(kind, ()):
        scales = rng.normal(0, 0.001, raw.shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def files_of(path: Path) -> ModelFiles:
    return ModelFiles(path.stem, "gguf", path)


def write_wide(folder: Path, kind: str, family: str = "Llama", **changes: Any) -> ModelFiles:
    """Write a file of a model whose matrices consist of whole blocks."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "m.gguf", TinyModel(family, {**WIDE, **changes}).build(), family.lower(), kind)
    return files_of(folder / "m.gguf")


def load_and_read(files: ModelFiles, dtype: str, quant_mode: str) -> tuple[LoadedModel, Tensor]:
    """Load the model; return it and the log-probabilities of a prompt's tokens."""
    loaded, config = open_model(files, dtype=dtype, quant_mode=quant_mode)
    entries = read_prompt(loaded, config, random_prompt(40, VOCAB_SIZE, 3), chunk=1)
    return loaded, torch.tensor([entry.logprob for entry in entries])


def write_gguf(
    path: Path, model: transformers.PreTrainedModel, arch: str, kind: str = "F32",
    extra: dict[str, Any] | None = None, tensors_per_part: int = 0, is_old: bool = False,
    tokenizer: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Write `model`, matrices as `kind`. Returns what the file really holds, under transformers' names.

    tensors_per_part: write several files, which the package names after `path`. is_old: write the older layout.
    tokenizer: its metadata; None: only names of tokens.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    num_extra = 0 if is_old else getattr(config, "num_nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + num_extra)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_family_fields(writer, config, is_old)
    if not getattr(config, "is_causal", True):
        writer.add_causal_attention(False)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
        writer.add_eos_token_id(config.eos_token_id)
    for name, value in (tokenizer or {}).items():
        kinds = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
        kinds[type(value)](name, value)
    held: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        held[name] = _write_tensor(writer, name, tensor, config, is_old, kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
    return held


def _write_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: Any, is_old: bool, kind: str) -> Tensor:
    num_heads = 0
    permute = writer.arch == "llama"
    if permute and ".q_proj." in name:
        num_heads = config.num_attention_heads
    elif permute and ".k_proj." in name:
        num_heads = config.num_key_value_heads
    stored = interleave(tensor, num_heads) if num_heads else tensor
    plain = tensor.ndim == 1 or name.endswith(("gate.weight", "_bias"))  # norms, biases and routers
    plain |= kind == "MXFP4" and ".experts." not in name
    quantization = gguf.GGMLQuantizationType["F32" if plain else kind]
    found = []
    for stored_name, piece in pieces(name, stored, writer.arch, config, is_old).items():
        values = np.ascontiguousarray(piece.float().numpy())
        try:
            raw = gguf.quantize(values, quantization)
        except NotImplementedError:
            raw = random_blocks(quantization, values.shape)
        writer.add_tensor(stored_name, raw, raw_dtype=quantization)
        read = np.array(gguf.dequantize(raw, quantization), dtype=np.float32)
        found.append(torch.from_numpy(read).view(piece.shape))
    if kind == "F32":
        return tensor
    if writer.arch == "gpt-oss" and ".experts." in name:
        return gpt_oss_weight(found, "bias" if name.endswith("_bias") else "weight")
    read_back = (torch.cat(found, dim=1) if len(found) > 1 else found[0]).view(tensor.shape)
    if writer.arch == "gemma3" and name.endswith("norm.weight"):
        return read_back - 1
    if not num_heads:
        return read_back
    restored = torch.empty_like(read_back)
    restored[interleave(torch.arange(tensor.shape[0]), num_heads)] = read_back
    return restored
