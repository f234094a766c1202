"""Tiny checkpoints in every supported layout of quantized weights, packed here from the layouts' definitions.

Nothing of the loader is used. `write` returns transformers' model with the weights that the files stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.tiny_models import CHOICE_BIAS, TinyModel

VOCAB_SIZE = 224
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
TINY = TinyModel("Qwen2", SIZES)
GROUP = 32
MAP = re.compile(r"(_proj|_with_mqa|lm_head|embed_tokens|\.w[123]|_projs\.\d+|\.(gate_up|down)\.\d+)$")
ROUTER = ".gate.weight"  # a linear layer in transformers 4, but for DeepSeek-V3
WeightsOf = Callable[[transformers.PreTrainedModel], Iterator[tuple[str, Tensor]]]
Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the last part of their names, and the weight they stand for


@dataclass(frozen=True)
class Format:
    """config: `quantization_config`. pack: a weight (n, k) -> its tensors. kept_plain: layers that are not packed."""

    config: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    label: str
    maps: str  # what a CPU makes of it
    kept_plain: tuple[str, ...] = ("lm_head", "embed_tokens")
    packs_routers: bool = False


def words_along_rows(codes: Tensor, bits: int) -> Tensor:
    """(rows, columns) of unsigned codes -> int32 (rows * bits / 32, columns): row 0 in the lowest bits."""
    values, per_word = codes.numpy().astype(np.uint32), 32 // bits
    words = np.zeros((values.shape[0] // per_word, values.shape[1]), np.uint32)
    for row in range(values.shape[0]):
        words[row // per_word] |= values[row] << np.uint32(bits * (row % per_word))
    return torch.from_numpy(words.view(np.int32))


def words_along_columns(codes: Tensor, bits: int, places: tuple[int, ...] = ()) -> Tensor:
    """The same along columns. places[i]: which column of a word's eight lies in nibble i."""
    values, per_word = codes.numpy().astype(np.uint32), 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint32)
    for nibble, place in enumerate(places or range(per_word)):
        words |= values[:, place::per_word] << np.uint32(bits * nibble)
    return torch.from_numpy(words.view(np.int32))


def in_groups(
    weight: Tensor, bits: int, group_of: Tensor, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(n, k) -> codes (n, k) from 0, scales (n, groups), zero points (n, groups) from 1, and the rounded weight."""
    top, num_groups = 2**bits - 1, int(group_of.max()) + 1
    codes, dequantized = torch.zeros(weight.shape, dtype=torch.int64), torch.zeros_like(weight)
    scales, zeros = torch.zeros(len(weight), num_groups, dtype=dtype), torch.zeros(len(weight), num_groups).long()
    for group in range(num_groups):
        columns = group_of == group
        part = weight[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).clamp(min=1e-4).to(dtype)
        zero = torch.full_like(scale, 2 ** (bits - 1)).long() if symmetric else (-low / scale).round().long()
        zero = zero.clamp(1, top)
        code = (part / scale.float()[:, None] + zero[:, None]).round().clamp(0, top).long()
        codes[:, columns], scales[:, group], zeros[:, group] = code, scale, zero
        dequantized[:, columns] = (code - zero[:, None]).float() * scale.float()[:, None]
    return codes, scales, zeros, dequantized


def group_of_columns(num_columns: int, group_size: int, shuffled: bool = False) -> Tensor:
    groups = torch.arange(num_columns) // (num_columns if group_size == -1 else group_size)
    return groups[torch.randperm(num_columns, generator=torch.Generator().manual_seed(7))] if shuffled else groups


def pack_gptq(
    weight: Tensor,
    bits: int = 4,
    group_size: int = GROUP,
    symmetric: bool = True,
    act_order: bool = False,
    minus: int = 1,
) -> Packed:
    group_of = group_of_columns(weight.shape[1], group_size, act_order)
    codes, scales, zeros, dequantized = in_groups(weight, bits, group_of, symmetric)
    tensors = {
        "qweight": words_along_rows(codes.t(), bits),
        "qzeros": words_along_columns(zeros.t() - minus, bits),
        "scales": scales.t().contiguous(),
        "g_idx": group_of.int(),
    }
    return tensors, dequantized


def pack_awq(weight: Tensor, group_size: int = GROUP) -> Packed:
    group_of = group_of_columns(weight.shape[1], group_size)
    codes, scales, zeros, dequantized = in_groups(weight, 4, group_of, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words_along_columns(codes.t(), 4, order),
        "qzeros": words_along_columns(zeros.t(), 4, order),
        "scales": scales.t().contiguous(),
    }
    return tensors, dequantized


def pack_integers(
    weight: Tensor, bits: int = 4, group_size: int = GROUP, symmetric: bool = True, act_order: bool = False
) -> Packed:
    """Pack as compressed-tensors' pack-quantized."""
    group_of = group_of_columns(weight.shape[1], group_size, act_order)
    codes, scales, zeros, dequantized = in_groups(weight, bits, group_of, symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": words_along_columns(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_along_rows(zeros, bits)
    if act_order:
        tensors["weight_g_idx"] = group_of.int()
    return tensors, dequantized


def pack_int8(weight: Tensor, per_row: bool = True) -> Packed:
    """Pack as compressed-tensors' int-quantized."""
    largest = weight.abs().amax(dim=1, keepdim=True) if per_row else weight.abs().max().reshape(1)
    scales = (largest / 127).float()
    codes = (weight / scales).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def pack_fp8(
    weight: Tensor, block: tuple[int, int], name: str = "weight_scale", shape: tuple[int, ...] = ()
) -> Packed:
    """Pack with one scale per block. shape: how the scales are stored, unless as one row per row of blocks."""
    rows, columns = block
    codes, dequantized = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            dequantized[place] = codes[place].float() * scales[i, j]
    return {"weight": codes, name: scales.reshape(shape) if shape else scales}, dequantized


def pack_nvfp4(weight: Tensor) -> Packed:
    """Pack as ModelOpt: round each number to the nearest e2m1 value, as transformers lists them for MXFP4."""
    from transformers.integrations.mxfp4 import FP4_VALUES  # here, because it takes 2 s

    groups = weight.unflatten(1, (-1, 16))
    numbers, second = torch.tensor(FP4_VALUES), weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / second).clamp(2**-6).to(torch.float8_e4m3fn)
    scaled = scales.float()[..., None] * second
    codes = (groups[..., None] / scaled[..., None] - numbers).abs().argmin(-1).flatten(1).to(torch.uint8)
    dequantized = (numbers[codes.long()].unflatten(1, (-1, 16)) * scaled).flatten(1)
    tensors = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": second}
    return {**tensors, "input_scale": torch.tensor(0.1)}, dequantized


def compressed(stored_as: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def gptq(bits: int = 4, group_size: Any = GROUP, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True, "desc_act": False, **changes}


def integers(bits: int, group_size: Any = GROUP, **changes: Any) -> dict[str, Any]:
    strategy = "channel" if group_size == -1 else "group"
    values = {"type": "int", "num_bits": bits, "strategy": strategy, "group_size": group_size, "symmetric": True}
    return {**values, **changes}


FP8 = {"type": "float", "num_bits": 8, "symmetric": True}
INPUTS8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT4, INT8, OTHER8 = "12 int4", "12 int8", "12 int8 of other groups"
FORMATS = {
    "gptq": Format(gptq(), pack_gptq, "gptq-4bit", INT4),
    "gptq-asymmetric": Format(gptq(sym=False), lambda w: pack_gptq(w, symmetric=False), "gptq-4bit", INT4),
    "gptq-v2": Format(
        gptq(checkpoint_format="gptq_v2"), lambda w: pack_gptq(w, symmetric=False, minus=0), "gptq-4bit", INT4
    ),
    "gptq-act-order": Format(
        gptq(desc_act=True), lambda w: pack_gptq(w, act_order=True), "gptq-4bit", "12 int4 reordered"
    ),
    "gptq-one-group": Format(gptq(group_size=-1), lambda w: pack_gptq(w, group_size=-1), "gptq-4bit", INT4),
    "gptq-8bit": Format(gptq(8), lambda w: pack_gptq(w, 8), "gptq-8bit", OTHER8),
    "gptq-8bit-one-group": Format(gptq(8, -1), lambda w: pack_gptq(w, 8, -1), "gptq-8bit", INT8),
    "gptq-head": Format(gptq(lm_head=True), pack_gptq, "gptq-4bit", "13 int4", kept_plain=("embed_tokens",)),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["lm_head"]},
        pack_awq, "awq-4bit", INT4,
    ),
    "awq-one-map-plain": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["v_proj"]},
        pack_awq, "awq-4bit", "9 int4", kept_plain=("lm_head", "embed_tokens", "v_proj"),
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 48]},
        lambda w: pack_fp8(w, (48, 48), "weight_scale_inv"), "fp8-blocks", "12 int8 of e4m3",
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: pack_fp8(w, (w.shape[0], w.shape[1]), shape=(1,)), "fp8-weights", "12 int8 of e4m3",
    ),
    "nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, pack_nvfp4, "nvfp4", OTHER8
    ),
    "modelopt-fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda w: pack_fp8(w, (w.shape[0], w.shape[1]), shape=(1,)), "modelopt-fp8", "12 int8 of e4m3",
    ),
    "compressed-fp8-channel": Format(
        compressed("float-quantized", {**FP8, "strategy": "channel"}, {**INPUTS8, "type": "float"}),
        lambda w: pack_fp8(w, (1, w.shape[1])), "compressed-tensors-fp8", "12 int8 of e4m3",
    ),
    "compressed-int8": Format(
        compressed("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel"}, INPUTS8),
        pack_int8, "compressed-tensors-w8a8", INT8,
    ),
    "compressed-int8-tensor": Format(
        compressed("int-quantized", {"type": "int", "num_bits": 8, "strategy": "tensor"}, INPUTS8),
        lambda w: pack_int8(w, per_row=False), "compressed-tensors-w8a8", INT8,
    ),
    "compressed-int4": Format(
        compressed("pack-quantized", integers(4)), pack_integers, "compressed-tensors-w4a16", INT4
    ),
    "compressed-int4-asymmetric": Format(
        compressed("pack-quantized", integers(4, symmetric=False)),
        lambda w: pack_integers(w, symmetric=False), "compressed-tensors-w4a16", INT4,
    ),
    "compressed-int4-act-order": Format(
        compressed("pack-quantized", integers(4, actorder="group")),
        lambda w: pack_integers(w, act_order=True), "compressed-tensors-w4a16", "12 int4 reordered",
    ),
    "compressed-int8-groups": Format(
        compressed("pack-quantized", integers(8)),
        lambda w: pack_integers(w, 8), "compressed-tensors-w8a16", OTHER8,
    ),
    "compressed-int8-rows": Format(
        compressed("pack-quantized", integers(8, -1)),
        lambda w: pack_integers(w, 8, -1), "compressed-tensors-w8a16", INT8,
    ),
}  # fmt: skip


def write(
    form: Format, path: Path, tiny: TinyModel = TINY, num_shards: int = 1, weights_of: WeightsOf | None = None
) -> transformers.PreTrainedModel:
    """Save the tiny model in `form`. Returns it with the rounded weights, in float32.

    weights_of: parts of the model's parameters by their names in the file, instead of `checkpoint_weights`.
    """
    model = tiny.build()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in (weights_of or checkpoint_weights)(model):
            module, _, last = name.rpartition(".")
            is_map = last == "weight" and bool(MAP.search(module))
            is_map |= form.packs_routers and name.endswith(ROUTER) and tiny.family != "DeepseekV3"
            if not is_map or module.endswith(form.kept_plain):
                tensors[name] = parameter.clone(memory_format=torch.contiguous_format)
                continue
            packed, rounded = form.pack(parameter.clone(memory_format=torch.contiguous_format))
            tensors.update({f"{module}.{part}": tensor.clone() for part, tensor in packed.items()})
            parameter.copy_(rounded)
    path.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    config = {**model.config.to_dict(), "quantization_config": form.config}
    (path / "config.json").write_text(json.dumps(config))
    save_shards(tensors, path, num_shards)
    return model


def checkpoint_weights(model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters as checkpoints name them: transformers holds all experts of a layer in two tensors."""
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(CHOICE_BIAS))
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, parameter
            continue
        for index, expert in enumerate(parameter):
            projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for projection, part in zip(projections, expert.chunk(len(projections)), strict=True):
                yield f"{module}.{index}.{projection}.weight", part


def save_shards(tensors: dict[str, Tensor], path: Path, num_shards: int) -> None:
    """A map's tensors land in different files when there are several."""
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    files = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
