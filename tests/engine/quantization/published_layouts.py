"""Packing and configs of the tools that publish checkpoints, in addition to those of `packed_files.py`."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from tests.engine.quantization.packed_files import GROUP, INPUTS8, Packed, compressed, pack_fp8, pack_nvfp4

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers that bitsandbytes' NF4 has, from `get_4bit_type` in its functional.py."""
BLOCK, NESTED_BLOCK = 64, 256


def pack_4bit(weight: Tensor, nested: bool) -> Packed:
    """Pack bitsandbytes' NF4: `quantize_4bit`, and with `nested` absmax in a byte each (`compress_statistics`)."""
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
    """Pack as bitsandbytes' LLM.int8()."""
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * (largest / 127)[:, None]


def pack_divided_nvfp4(weight: Tensor) -> Packed:
    """Pack as compressed-tensors' nvfp4-pack-quantized: ModelOpt's numbers, the reciprocal of its second scale."""
    tensors, rounded = pack_nvfp4(weight)
    second = 1 / tensors["weight_scale_2"].reshape(1)
    scales = tensors["weight_scale"]
    names = {"weight_packed": tensors["weight"], "weight_scale": scales, "weight_global_scale": second}
    return {**names, "input_global_scale": torch.tensor([8.0])}, rounded


def bitsandbytes(bits: int, **changes: Any) -> dict[str, Any]:
    """Return the result of transformers' `BitsAndBytesConfig.to_dict`."""
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
    """Return a config as compressed-tensors 0.10 and later writes it, with fields that we do not read."""
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
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int", "iters": 200,
    "autoround_version": "0.8.0", "packing_format": "auto_round:auto_gptq", "extra_config": {
        "lm_head": {"bits": 16, "data_type": "float"}, "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
    },
}  # fmt: skip
AUTO_AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
PRODUCER = {"producer": {"name": "modelopt", "version": "0.29.0"}}
UNSLOTH_SKIPS = ["lm_head", "multi_modal_projector", "merger", "model.layers.1.self_attn", "model.layers.1.mlp"]
FP8_INPUTS = {**INPUTS8, "type": "float", "symmetric": True, "observer": None}


def without_index(packed: Packed) -> Packed:
    """Pack GPTQ's layout without `g_idx`, because groups are in order."""
    tensors, rounded = packed
    return {name: tensor for name, tensor in tensors.items() if name != "g_idx"}, rounded


def whole(weight: Tensor) -> Packed:
    """Pack FP8 with one scale of the weight and one of the inputs."""
    tensors, rounded = pack_fp8(weight, (weight.shape[0], weight.shape[1]), shape=())
    return {**tensors, "weight_scale": tensors["weight_scale"].reshape(()), "input_scale": torch.tensor(0.1)}, rounded
