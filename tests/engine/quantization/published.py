"""Tiny checkpoints laid out as the tools that people publish with write them: tensors, files beside them, configs.

Facts were looked up in the tools' own sources (named in `source`), or in files published with them; nothing of the
loader is used. What a layout has in common with others is packed by `packed_files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.quantization.packed_files import (
    FP8,
    GROUP,
    INPUTS8,
    SIZES,
    Format,
    Packed,
    compressed,
    integers,
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int8,
    pack_integers,
    pack_nvfp4,
    write,
)
from tests.engine.tiny_models import GEMMA3, QWEN3_EXPERTS, TinyModel

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers that bitsandbytes' NF4 has, from `get_4bit_type` in its functional.py."""
BLOCK, NESTED_BLOCK = 64, 256
TINY_SIZES = {**SIZES, "num_hidden_layers": 2}
FAMILIES = {
    "Qwen2": TinyModel("Qwen2", TINY_SIZES),
    "Llama": TinyModel("Llama", TINY_SIZES),
    "Mistral": TinyModel("Mistral", {**TINY_SIZES, "sliding_window": 21}),
    "Qwen3": TinyModel("Qwen3", {**TINY_SIZES, "head_dim": 16}),
    "Gemma-3": TinyModel("Gemma3", {**GEMMA3, **TINY_SIZES}),
    "Phi-3": TinyModel("Phi3", TINY_SIZES),
    "Qwen3-MoE": TinyModel("Qwen3Moe", {**TINY_SIZES, **QWEN3_EXPERTS, "head_dim": 16, "moe_intermediate_size": 64}),
}


@dataclass(frozen=True)
class Published:
    """tool, what: who made it, and which of its layouts. source: where the layout is defined. cpu, gpu: weights in
    memory. file: beside config.json, where the config lies under `key`, and what else is there.
    """

    tool: str
    what: str
    source: str
    form: Format
    cpu: str
    gpu: str
    file: str = ""
    key: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    kv_scales: bool = False

    def write(self, path: Path, tiny: TinyModel) -> transformers.PreTrainedModel:
        """Returns transformers' model with the weights that the files stand for."""
        model = write(self.form, path, tiny)
        if self.file:
            config = json.loads((path / "config.json").read_text())
            method = config["quantization_config"]
            assert method.pop("quant_method")
            (path / self.file).write_text(json.dumps({**self.beside, self.key: method} if self.key else method))
            del config["quantization_config"]
            (path / "config.json").write_text(json.dumps(config))
        if self.kv_scales:
            tensors = load_file(path / "model.safetensors")
            layers = {name.partition("self_attn.")[0] for name in tensors if ".self_attn." in name}
            for layer in layers:
                for kind in "kv":
                    tensors[f"{layer}self_attn.{kind}_proj.{kind}_scale"] = torch.tensor(0.25)
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return model


def pack_4bit(weight: Tensor, nested: bool) -> Packed:
    """bitsandbytes' NF4: `quantize_4bit`, and with `nested` its absmax in a byte each (`compress_statistics`)."""
    numbers, shape = torch.tensor(NF4), list(weight.shape)
    blocks = weight.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    codes = (blocks[..., None] / absmax[:, None, None] - numbers).abs().argmin(-1).flatten().to(torch.uint8)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": shape}
    tensors = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": numbers}
    if nested:
        offset = float(absmax.mean())
        levels = torch.linspace(-1, 1, 256)  # there a map with finer steps around zero, read from the file as well
        groups = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
        largest = groups.abs().amax(1).clamp(min=1e-8)
        nearest = (groups[..., None] / largest[:, None, None] - levels).abs().argmin(-1)
        absmax = (levels[nearest] * largest[:, None]).flatten()[: len(absmax)] + offset
        stored = nearest.flatten()[: len(absmax)].to(torch.uint8)
        tensors |= {"weight.absmax": stored, "weight.nested_absmax": largest, "weight.nested_quant_map": levels}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = absmax
    blob = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = blob
    return tensors, (numbers[codes.long()].view(-1, BLOCK) * absmax[:, None]).view(shape)


def pack_scb(weight: Tensor) -> Packed:
    """bitsandbytes' LLM.int8()."""
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * (largest / 127)[:, None]


def pack_divided_nvfp4(weight: Tensor) -> Packed:
    """compressed-tensors' nvfp4-pack-quantized: ModelOpt's numbers, and the reciprocal of its second scale."""
    tensors, rounded = pack_nvfp4(weight)
    second = 1 / tensors["weight_scale_2"].reshape(1)
    scales = tensors["weight_scale"]
    names = {"weight_packed": tensors["weight"], "weight_scale": scales, "weight_global_scale": second}
    return {**names, "input_global_scale": torch.tensor([8.0])}, rounded


def bitsandbytes(bits: int, **changes: Any) -> dict[str, Any]:
    """What `BitsAndBytesConfig.to_dict` of transformers gives."""
    return {
        "_load_in_4bit": bits == 4, "_load_in_8bit": bits == 8, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0, "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8, "quant_method": "bitsandbytes", **changes,
    }  # fmt: skip


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"], **changes,
    }  # fmt: skip


def llm_compressor(stored_as: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a config that compressed-tensors 0.10 and later writes beside those that are read."""
    config = compressed(stored_as, {**WEIGHT_FIELDS, **weights}, inputs)
    group = {**config["config_groups"]["group_0"], "output_activations": None}
    return {
        **config, "config_groups": {"group_0": group}, "global_compression_ratio": None, "kv_cache_scheme": None,
        "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    }  # fmt: skip


WEIGHT_FIELDS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip
AUTO_GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "damp_percent": 0.1, "desc_act": False, "sym": True,
    "static_groups": False, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
GPTQ_MODEL: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False,
    "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {
        "quantizer": ["gptqmodel:5.7.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
        "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0,
    },
}  # fmt: skip
AUTO_AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
PRODUCER = {"producer": {"name": "modelopt", "version": "0.29.0"}}
UNSLOTH_SKIPS = ["lm_head", "multi_modal_projector", "merger", "model.layers.1.self_attn", "model.layers.1.mlp"]
FP8_INPUTS = {**INPUTS8, "type": "float", "symmetric": True, "observer": None}


def whole(weight: Tensor) -> Packed:
    """FP8 with one scale, and one of inputs."""
    tensors, rounded = pack_fp8(weight, (weight.shape[0], weight.shape[1]), shape=())
    return {**tensors, "weight_scale": tensors["weight_scale"].reshape(()), "input_scale": torch.tensor(0.1)}, rounded


def form(config: dict[str, Any], pack: Any, label: str, *kept_plain: str) -> Format:
    return Format(config, pack, label, "", ("lm_head", "embed_tokens", *kept_plain))


GPTQ_SOURCE, CT_SOURCE = "AutoGPTQ auto_gptq/nn_modules/qlinear", "compressed-tensors src/compressed_tensors"
BNB_SOURCE = "bitsandbytes bitsandbytes/functional.py (QuantState.as_dict), nn/modules.py (Linear8bitLt)"
MODELOPT_SOURCE = "Model-Optimizer modelopt/torch/export (hf_quant_config.json)"
PUBLISHED = {
    "autogptq": Published(
        "AutoGPTQ", "4 bits", GPTQ_SOURCE, form(AUTO_GPTQ, pack_gptq, "gptq-4bit"), "4 bits", "4 bits",
    ),
    "autogptq-file": Published(
        "AutoGPTQ", "8 bits, act-order, in `quantize_config.json`", GPTQ_SOURCE,
        form({**AUTO_GPTQ, "bits": 8, "desc_act": True}, lambda w: pack_gptq(w, 8, act_order=True), "gptq-8bit"),
        "int8", "int8", file="quantize_config.json",
    ),
    "gptqmodel": Published(
        "GPTQModel", "4 bits", "GPTQModel gptqmodel/quantization/config.py",
        form(GPTQ_MODEL, pack_gptq, "gptq-4bit"), "4 bits", "4 bits",
    ),
    "gptqmodel-v2": Published(
        "GPTQModel", "4 bits, `gptq_v2`", "GPTQModel gptqmodel/quantization/config.py",
        form({**GPTQ_MODEL, "checkpoint_format": "gptq_v2", "format": "gptq_v2", "sym": False},
             lambda w: pack_gptq(w, symmetric=False, minus=0), "gptq-4bit"), "4 bits", "4 bits",
    ),
    "autoawq": Published(
        "AutoAWQ", "4 bits, GEMM", "AutoAWQ awq/modules/linear/gemm.py, awq/utils/packing_utils.py",
        form(AUTO_AWQ, pack_awq, "awq-4bit"), "4 bits", "4 bits",
    ),
    "autoawq-file": Published(
        "AutoAWQ", "4 bits, in `quant_config.json`", "AutoAWQ awq/models/_config.py (AwqConfig.save_pretrained)",
        form({"quant_method": "awq", "zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"},
             pack_awq, "awq-4bit"), "4 bits", "4 bits", file="quant_config.json",
    ),
    "llm-compressor-w4a16": Published(
        "llm-compressor", "W4A16", CT_SOURCE + "/compressors (pack_quantized)",
        form(llm_compressor("pack-quantized", integers(4)), pack_integers, "compressed-tensors-w4a16"),
        "4 bits", "4 bits",
    ),
    "llm-compressor-w8a8": Published(
        "llm-compressor", "W8A8, int8", CT_SOURCE + "/compressors (int_quantized)",
        form(llm_compressor("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True},
                            {**INPUTS8, "symmetric": True, "observer": None}),
             pack_int8, "compressed-tensors-w8a8"), "int8", "int8",
    ),
    "llm-compressor-fp8-dynamic": Published(
        "llm-compressor", "FP8, dynamic", CT_SOURCE + "/compressors (float_quantized)",
        form(llm_compressor("float-quantized", {**FP8, "strategy": "channel"}, FP8_INPUTS),
             lambda w: pack_fp8(w, (1, w.shape[1])), "compressed-tensors-fp8"), "int8", "e4m3",
    ),
    "llm-compressor-fp8-block": Published(
        "llm-compressor", "FP8, blocks", CT_SOURCE + "/quantization/quant_scheme.py (FP8_BLOCK)",
        form(llm_compressor("float-quantized", {**FP8, "strategy": "block", "block_structure": [32, 32]}, FP8_INPUTS),
             lambda w: pack_fp8(w, (32, 32)), "compressed-tensors-fp8"), "int8", "e4m3",
    ),
    "llm-compressor-nvfp4": Published(
        "llm-compressor", "NVFP4", CT_SOURCE + "/compressors (nvfp4_quantized)",
        form(llm_compressor("nvfp4-pack-quantized",
                            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16,
                             "symmetric": True},
                            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "dynamic": "local"}),
             pack_divided_nvfp4, "compressed-tensors-nvfp4"), "int8", "int8",
    ),
    "modelopt-fp8": Published(
        "ModelOpt", "FP8, in `hf_quant_config.json`", MODELOPT_SOURCE, form(modelopt("FP8"), whole, "modelopt-fp8"),
        "int8", "e4m3", file="hf_quant_config.json", key="quantization", beside=PRODUCER, kv_scales=True,
    ),
    "modelopt-nvfp4": Published(
        "ModelOpt", "NVFP4, in `hf_quant_config.json`", MODELOPT_SOURCE,
        form(modelopt("NVFP4", group_size=16), pack_nvfp4, "nvfp4"),
        "int8", "int8", file="hf_quant_config.json", key="quantization", beside=PRODUCER, kv_scales=True,
    ),
    "bitsandbytes-nf4": Published(
        "bitsandbytes", "NF4", BNB_SOURCE, form(bitsandbytes(4), lambda w: pack_4bit(w, False), "int8-weight"),
        "int8", "bfloat16",
    ),
    "bitsandbytes-int8": Published(
        "bitsandbytes", "int8", BNB_SOURCE, form(bitsandbytes(8), pack_scb, "int8-weight"), "int8", "bfloat16",
    ),
    "unsloth-4bit": Published(
        "Unsloth", "4 bits (NF4, nested scales)", BNB_SOURCE,
        form(bitsandbytes(4, bnb_4bit_use_double_quant=True), lambda w: pack_4bit(w, True), "int8-weight"),
        "int8", "bfloat16",
    ),
    "unsloth-dynamic": Published(
        "Unsloth", "dynamic 4 bits, some layers plain", BNB_SOURCE,
        form(bitsandbytes(4, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=UNSLOTH_SKIPS),
             lambda w: pack_4bit(w, True), "int8-weight",
             *(f"layers.1.self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv"))),
        "int8", "bfloat16",
    ),
}  # fmt: skip


def without(entry: Published, part: str) -> Published:
    """A layout that lacks a tensor of each layer."""

    def pack(weight: Tensor) -> Packed:
        tensors, rounded = entry.form.pack(weight)
        return {name: tensor for name, tensor in tensors.items() if name != part}, rounded

    return replace(entry, form=replace(entry.form, pack=pack))
