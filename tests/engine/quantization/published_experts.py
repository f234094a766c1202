"""Names in files of expert weights that transformers holds stacked, by family and by the tool that writes them.

Each yields parts of a model's parameters: what is written into them, the model has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.quantization.packed_files import WeightsOf, checkpoint_weights
from tests.engine.tiny_models import TinyModel

Named = Iterator[tuple[str, Tensor]]
MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, of the OCP Microscaling formats
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral(model: transformers.PreTrainedModel) -> Named:
    """Yield weights named as by Mistral and all later tools: block_sparse_moe, w1, w3 and w2."""
    for name, parameter in checkpoint_weights(model):
        renamed = name.replace(".mlp.", ".block_sparse_moe.")
        if ".experts." in name:
            for ours, theirs in MIXTRAL.items():
                renamed = renamed.replace(ours, theirs)
        yield renamed, parameter


def gpt_oss(gate_up: tuple[str, ...], down: str, router: str = "router") -> WeightsOf:
    """Yield unstacked experts: gate and up, which are interleaved in the stacked weight, and down, by expert."""

    def weights_of(model: transformers.PreTrainedModel) -> Named:
        for name, parameter in model.named_parameters():
            module, _, last = name.rpartition(".")
            if not module.endswith(".experts"):
                yield name.replace(".router.", f".{router}."), parameter
                continue
            layers = gate_up if last.startswith("gate_up") else (down,)
            kind = "bias" if last.endswith("_bias") else "weight"
            for index, expert in enumerate(parameter):
                for turn, layer in enumerate(layers):
                    part = expert[..., turn :: len(layers)]
                    yield f"{module}.{layer.format(index)}.{kind}", part.t() if part.dim() == 2 else part

    return weights_of


GPT_OSS = {
    "gptqmodel": gpt_oss(("gate_up.{}",), "down.{}"),
    "unsloth": gpt_oss(("gate_up_projs.{}",), "down_projs.{}", "router.linear"),
    "llm-compressor": gpt_oss(("{}.gate_proj", "{}.up_proj"), "{}.down_proj"),
    "llm-compressor-0.8": gpt_oss(("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"),
    "stacked": lambda model: model.named_parameters(),
}


def write_mxfp4(path: Path, tiny: TinyModel) -> transformers.PreTrainedModel:
    """Write gpt-oss as OpenAI publishes it: experts in blocks of 32 inputs, a config that names what is plain."""
    model, tensors = tiny.build(), {}
    numbers = torch.tensor([*MXFP4_NUMBERS, *(-number for number in MXFP4_NUMBERS)])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = parameter.clone()
                continue
            groups = parameter.mT.unflatten(-1, (-1, 32))  # (experts, outputs, groups, 32)
            exponents = (groups.abs().amax(-1) / 6).log2().ceil()
            scaled = groups / exponents.exp2()[..., None]
            codes = (scaled[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
            parameter.copy_((numbers[codes.long()] * exponents.exp2()[..., None]).flatten(-2).mT)
            tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4}
            tensors |= {f"{name}_scales": (exponents + 127).to(torch.uint8)}
    path.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"modules_to_not_convert": plain, "quant_method": "mxfp4"}
    config = {**model.config.to_dict(), "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return model
