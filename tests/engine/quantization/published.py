"""Tiny checkpoints laid out as publishing tools write them: tensors, configs, other files.

Facts were looked up in the tools' own sources (named in `source`), or in files published with them; nothing of the
loader is used. What a layout has in common with others is packed by `packed_files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.quantization.packed_files import (
    FP8,
    GROUP,
    INPUTS8,
    SIZES,
    Format,
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
from tests.engine.quantization.published_experts import GPT_OSS as GPT_OSS_NAMES
from tests.engine.quantization.published_experts import mixtral, write_mxfp4
from tests.engine.quantization.published_layouts import (
    AUTO_AWQ,
    AUTO_GPTQ,
    AUTO_ROUND,
    FP8_INPUTS,
    GPTQ_MODEL,
    PRODUCER,
    UNSLOTH_SKIPS,
    bitsandbytes,
    llm_compressor,
    modelopt,
    pack_4bit,
    pack_divided_nvfp4,
    pack_scb,
    whole,
    without_index,
)
from tests.engine.tiny_models import DEEPSEEK, DEEPSEEK_ROPE, GEMMA3, GPT_OSS, QWEN3_EXPERTS, TinyModel

TINY_SIZES = {**SIZES, "num_hidden_layers": 2}
LATENTS = {
    **DEEPSEEK, **TINY_SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
FAMILIES = {
    "Qwen2": TinyModel("Qwen2", TINY_SIZES),
    "Llama": TinyModel("Llama", TINY_SIZES),
    "Mistral": TinyModel("Mistral", {**TINY_SIZES, "sliding_window": 21}),
    "Qwen3": TinyModel("Qwen3", {**TINY_SIZES, "head_dim": 16}),
    "Gemma-3": TinyModel("Gemma3", {**GEMMA3, **TINY_SIZES}),
    "Phi-3": TinyModel("Phi3", TINY_SIZES),
    "Qwen3-MoE": TinyModel("Qwen3Moe", {**TINY_SIZES, **QWEN3_EXPERTS, "head_dim": 16, "moe_intermediate_size": 64}),
    "Mixtral": TinyModel("Mixtral", {**TINY_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": TinyModel("DeepseekV2", {**LATENTS, **DEEPSEEK_ROPE}),
    "DeepSeek-V3": TinyModel(
        "DeepseekV3", {**LATENTS, **DEEPSEEK_ROPE, "q_lora_rank": 64, "n_group": 4, "topk_group": 2}
    ),
    "gpt-oss": TinyModel("GptOss", {**GPT_OSS, **TINY_SIZES, "head_dim": 16, "intermediate_size": 64}),
}


@dataclass(frozen=True)
class Published:
    """tool, what: who made it, and which of its layouts. source: where the layout is defined. cpu, gpu: weights in
    memory. file: another file with the config under `key`; beside: its other fields. gpt_oss: how the tool
    names the experts of gpt-oss; empty: it publishes none. writer: for layouts published only for gpt-oss.
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
    gpt_oss: str = ""
    writer: Callable[[Path, TinyModel], transformers.PreTrainedModel] | None = None

    @property
    def families(self) -> tuple[str, ...]:
        """Return the families that the tool's checkpoints are published for."""
        if self.writer is not None:
            return ("gpt-oss",)
        return tuple(family for family in FAMILIES if family != "gpt-oss" or self.gpt_oss)

    def write(self, path: Path, tiny: TinyModel) -> transformers.PreTrainedModel:
        """Write the files. Returns transformers' model with the weights that the files stand for."""
        if self.writer is not None:
            return self.writer(path, tiny)
        weights_of = {"Mixtral": mixtral, "GptOss": GPT_OSS_NAMES.get(self.gpt_oss)}.get(tiny.family)
        model = write(self.form, path, tiny, weights_of=weights_of)
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


def form(config: dict[str, Any], pack: Any, label: str, *kept_plain: str, packs_routers: bool = False) -> Format:
    return Format(config, pack, label, "", ("lm_head", "embed_tokens", *kept_plain), packs_routers)


GPTQ_SOURCE, CT_SOURCE = "AutoGPTQ auto_gptq/nn_modules/qlinear", "compressed-tensors src/compressed_tensors"
BNB_SOURCE = "bitsandbytes bitsandbytes/functional.py (QuantState.as_dict), nn/modules.py (Linear8bitLt)"
AUTO_ROUND_SOURCE = "auto-round auto_round/export/export_to_autoround"
FP8_SOURCE = "transformers src/transformers/integrations/finegrained_fp8.py"
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
        form(GPTQ_MODEL, pack_gptq, "gptq-4bit"), "4 bits", "4 bits", gpt_oss="gptqmodel",
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
    "auto-round": Published(
        "AutoRound", "4 bits, `auto_gptq`", AUTO_ROUND_SOURCE,
        form(AUTO_ROUND, lambda w: without_index(pack_gptq(w)), "auto-round-4bit"), "4 bits", "4 bits",
    ),
    "auto-round-awq": Published(
        "AutoRound", "4 bits, `auto_awq`", AUTO_ROUND_SOURCE,
        form({**AUTO_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}, pack_awq, "auto-round-4bit"),
        "4 bits", "4 bits",
    ),
    "llm-compressor-w4a16": Published(
        "llm-compressor", "W4A16", CT_SOURCE + "/compressors (pack_quantized)",
        form(llm_compressor("pack-quantized", integers(4)), pack_integers, "compressed-tensors-w4a16"),
        "4 bits", "4 bits", gpt_oss="llm-compressor",
    ),
    "llm-compressor-w8a8": Published(
        "llm-compressor", "W8A8, int8", CT_SOURCE + "/compressors (int_quantized)",
        form(llm_compressor("int-quantized", {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True},
                            {**INPUTS8, "symmetric": True, "observer": None}),
             pack_int8, "compressed-tensors-w8a8"), "int8", "int8", gpt_oss="llm-compressor-0.8",
    ),
    "llm-compressor-fp8-dynamic": Published(
        "llm-compressor", "FP8, dynamic", CT_SOURCE + "/compressors (float_quantized)",
        form(llm_compressor("float-quantized", {**FP8, "strategy": "channel"}, FP8_INPUTS),
             lambda w: pack_fp8(w, (1, w.shape[1])), "compressed-tensors-fp8"), "int8", "e4m3",
        gpt_oss="llm-compressor",
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
    "openai-mxfp4": Published(
        "OpenAI, Unsloth", "MXFP4 experts", "transformers src/transformers/integrations/mxfp4.py",
        form({}, None, "mxfp4"), "4 bits", "4 bits", writer=write_mxfp4,
    ),
    "fp8-block": Published(
        "DeepSeek, Qwen, transformers", "FP8, blocks of 128, `weight_scale_inv`", FP8_SOURCE,
        form({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
              "modules_to_not_convert": ["lm_head"]},
             lambda w: pack_fp8(w, (128, 128), "weight_scale_inv"), "fp8-blocks"), "int8", "e4m3",
    ),
    "autofp8": Published(
        "AutoFP8", "FP8", "AutoFP8 auto_fp8/quantize.py, auto_fp8/config.py",
        form({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
              "kv_cache_scheme": None}, whole, "fp8-weights"), "int8", "e4m3",
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
        "bitsandbytes", "NF4", BNB_SOURCE,
        form(bitsandbytes(4), lambda w: pack_4bit(w, False), "int8-weight", packs_routers=True), "int8", "bfloat16",
        gpt_oss="stacked",
    ),
    "bitsandbytes-int8": Published(
        "bitsandbytes", "int8", BNB_SOURCE, form(bitsandbytes(8), pack_scb, "int8-weight", packs_routers=True),
        "int8", "bfloat16", gpt_oss="stacked",
    ),
    "unsloth-4bit": Published(
        "Unsloth", "4 bits (NF4, nested scales)", BNB_SOURCE,
        form(bitsandbytes(4, bnb_4bit_use_double_quant=True), lambda w: pack_4bit(w, True), "int8-weight",
             packs_routers=True),
        "int8", "bfloat16", gpt_oss="unsloth",
    ),
    "unsloth-dynamic": Published(
        "Unsloth", "dynamic 4 bits, some layers plain", BNB_SOURCE,
        form(bitsandbytes(4, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=UNSLOTH_SKIPS),
             lambda w: pack_4bit(w, True), "int8-weight",
             *(f"layers.1.self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv"))),
        "int8", "bfloat16",
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # tool, what, source, `quantization_config`
    "mlx": ("MLX", "any", "mlx-lm mlx_lm/utils.py (save_config)", {"group_size": 64, "bits": 4}),
    "quark": ("AMD Quark", "any", "Quark quark/torch/export (quant_method)",
              {"quant_method": "quark", "quant_mode": "eager_mode", "export": {"pack_method": "reorder"}}),
    "auto-round": ("AutoRound", "MXFP4, NVFP4", AUTO_ROUND_SOURCE,
                   {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp",
                    "packing_format": "auto_round:llm_compressor"}),
    "hqq": ("HQQ", "any", "transformers src/transformers/utils/quantization_config.py",
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}),
    "torchao": ("torchao", "any", "transformers src/transformers/utils/quantization_config.py",
                {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}),
    "modelopt-mixed": ("ModelOpt", "mixed precision", MODELOPT_SOURCE,
                       {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}),
    "llm-compressor-mxfp4": ("llm-compressor", "MXFP4", CT_SOURCE + "/compressors (mxfp4_quantized)",
                             compressed("mxfp4-pack-quantized", {**FP8, "num_bits": 4, "group_size": 32})),
}  # fmt: skip
