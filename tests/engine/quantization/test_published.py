"""Checkpoints as their tools write them compute what their weights say; docs/checkpoints.md lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError, UnsupportedModelError
from common.model_files import resolve_model
from engine.loader.safetensors import SafetensorsWeights
from engine.loader.source import open_source
from engine.models.hf_config import read_hf_config
from engine.quantization.bitsandbytes import BitsAndBytesWeights
from engine.quantization.checkpoint import QuantizedCheckpoint
from engine.quantization.unstacked_experts import UnstackedExperts
from kernels.gguf.library import library
from tests.checkpoints import page
from tests.engine.driving import answers, engine_config
from tests.engine.quantization.packed_files import SIZES, Format, pack_fp8, save_shards, write
from tests.engine.quantization.published import FAMILIES, PUBLISHED, REFUSED
from tests.engine.quantization.published_layouts import NF4, bitsandbytes
from tests.engine.quantization.test_packed_checkpoint import PROMPT, load, logits
from tests.engine.speculation.mtp.modules import ModelWithModule
from tests.engine.threaded_ranks import GREEDY, NUM_TOKENS, open_ranks, open_stages
from tests.engine.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_ROPE,
    TinyModel,
    edit_config,
    edit_weights,
    reference_greedy,
    reference_logits,
)
from tests.kernels.helpers import relative_error

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
UP = "model.layers.1.mlp.up_proj"
FLOAT32: dict[str, Any] = {"dtype": "float32", "quant_mode": "none"}


# Families with the same weight layout take turns: each format is tested with one; `pytest -m soak` runs the others.
LIE_ALIKE = (("Qwen2", "Llama", "Mistral", "Qwen3", "Gemma-3"), ("DeepSeek-V2", "DeepSeek-V3"))


def checkpoints() -> Iterator[Any]:
    for turn, (name, entry) in enumerate(PUBLISHED.items()):
        for family in entry.families:
            alike = next((families for families in LIE_ALIKE if family in families), (family,))
            is_next = family == alike[turn % len(alike)]
            yield pytest.param(name, family, marks=[] if is_next else pytest.mark.soak)


@pytest.mark.parametrize(("name", "family"), checkpoints())
def test_a_checkpoint_computes_what_its_weights_say(name: str, family: str, tmp_path: Path) -> None:
    entry, path = PUBLISHED[name], tmp_path / "m"
    model = entry.write(path, FAMILIES[family])
    exact = reference_logits(model, PROMPT)[-1]
    result, loaded = logits(path, 13, dtype="float32")
    assert loaded.quant_mode == "none"
    torch.testing.assert_close(result, exact, atol=2e-4, rtol=0)
    held, loaded = logits(path, 20, dtype="bfloat16")
    stays = family != "gpt-oss" or (entry.form.label == "mxfp4" and library() is not None)
    assert loaded.quant_mode == (entry.form.label if stays else "int8-weight")
    if relative_error(held, exact) > 0.14:  # bfloat16 may have chosen other experts, but not for every prompt
        assert loaded.config.moe is not None
        other = PROMPT[1:]
        exact, held = reference_logits(model, other)[-1], logits(path, 20, other, dtype="bfloat16")[0]
    assert relative_error(held, exact) < 0.14


def test_the_page_is_what_its_sources_say() -> None:
    written = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    assert written == page(), "run `python -m tests.checkpoints > docs/checkpoints.md`"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    PUBLISHED["autogptq"].write(path, FAMILIES["Llama"])
    edit_config(path, quantization_config=REFUSED[name][3])
    with pytest.raises(UnsupportedModelError, match=r"is not supported; supported are GPTQ .*; other models as GGUF"):
        load(path)


@pytest.mark.wing("engine.mla")
def test_deepseek_v3_as_it_is_published(tmp_path: Path) -> None:
    """Blocks of 128 that end within weights, an older config.json, a module after the layers, several files."""
    sizes = {
        **SIZES, **DEEPSEEK, "hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 96, "n_group": 4,
        "topk_group": 2, "q_lora_rank": 160, "kv_lora_rank": 144, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "num_key_value_heads": 4, "num_hidden_layers": 4, **DEEPSEEK_ROPE,
    }  # fmt: skip
    method = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    form = Format(method, lambda weight: pack_fp8(weight, (128, 128), "weight_scale_inv"), "fp8-blocks", "")
    path, kind = tmp_path / "m", ModelWithModule()
    model = write(form, path, TinyModel("DeepseekV3", sizes))
    kind.divide(path, kind.tensors(model))
    model.model.layers = model.model.layers[:-1]
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")},
        "torch_dtype": "bfloat16", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
        "ep_size": 1, "pretraining_tp": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    assert "model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv" in tensors
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    (path / "model.safetensors").unlink()
    save_shards(tensors, path, 3)
    exact = reference_logits(model, PROMPT)[-1]
    torch.testing.assert_close(logits(path, 13, dtype="float32")[0], exact, atol=2e-4, rtol=0)
    held, loaded = logits(path, 20, dtype="bfloat16")
    assert loaded.quant_mode == "fp8-blocks"
    rounded = logits(path, 20, dtype="bfloat16", quant_mode="int8-weight")[0]  # chooses other experts than float32
    assert relative_error(held, rounded) < 0.02


def test_mlx_is_refused(tmp_path: Path) -> None:
    """As mlx-lm's `save_config` in utils.py writes it: under both names, or only under its own in older files."""
    path = tmp_path / "m"
    PUBLISHED["autogptq"].write(path, FAMILIES["Llama"])
    mlx = {"group_size": 64, "bits": 4}
    for under_both in (None, mlx):
        edit_config(path, quantization=mlx, quantization_config=under_both)
        with pytest.raises(UnsupportedModelError, match=r"MLX's packing, which is for Apple's GPUs,.*GGUF"):
            load(path)


def one_weight(path: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    source = BitsAndBytesWeights(SafetensorsWeights(path, torch.float32, torch.device("cpu")), {})
    return source.take("a.weight", source.shapes["a.weight"])


def test_four_bits_are_those_of_bitsandbytes(tmp_path: Path) -> None:
    """The first numbers of a published weight: what bitsandbytes 0.49.2 made of these bytes on a GPU, in bfloat16."""
    packed = [110, 90, 88, 44, 228, 163, 9, 25]
    expected = [
        -0.002838, 0.022583, -0.005768, 0.00769, -0.005768, 0.002487, -0.016357, 0.013794, 0.022583, -0.008911,
        0.00769, -0.012329, -0.03125, 0.005035, -0.021729, 0.005035,
    ]  # fmt: skip
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 8]}
    weight = one_weight(
        tmp_path,
        {
            "a.weight": torch.tensor(packed, dtype=torch.uint8)[:, None],
            "a.weight.absmax": torch.tensor([0.03125]),
            "a.weight.quant_map": torch.tensor(NF4),
            "a.weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        },
    )
    torch.testing.assert_close(weight.flatten(), torch.tensor(expected), atol=0, rtol=4e-3)


@pytest.mark.parametrize("name", ["unsloth-4bit", "bitsandbytes-int8"])
@pytest.mark.parametrize("family", ["Phi-3", "Qwen3-MoE", "gpt-oss"])
def test_ranks_and_stages_equal_transformers(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PUBLISHED[name].write(tmp_path / "m", FAMILIES[family])
    expected = [reference_greedy(model, PROMPT, NUM_TOKENS)]
    for opened in (open_ranks, open_stages):
        parts = opened(tmp_path / "m", 2, monkeypatch, **FLOAT32)
        assert answers(parts.engine, [PROMPT], GREEDY) == expected


@pytest.mark.parametrize("name", ["gptqmodel", "llm-compressor-w4a16"])
def test_parts_of_experts_that_lie_apart(name: str, tmp_path: Path) -> None:
    """Also those that begin and end between a gate and its up."""
    PUBLISHED[name].write(tmp_path / "m", FAMILIES["gpt-oss"])
    source = open_source(
        resolve_model(str(tmp_path / "m")), engine_config(str(tmp_path)), torch.float32, torch.device("cpu")
    )
    source.checked_skeleton()
    weights = source.weights
    assert isinstance(weights, UnstackedExperts)
    experts = "model.layers.1.mlp.experts"
    for stacked, shape in ((f"{experts}.gate_up_proj", (6, 64, 128)), (f"{experts}.down_proj_bias", (6, 64))):
        whole = weights.take(stacked, shape)
        assert whole.shape == shape
        for columns in (range(64), range(33, 62)):
            part = weights.take_part(stacked, (range(2, 5), *map(range, shape[1:-1]), columns))
            assert torch.equal(part, whole[2:5, ..., columns.start : columns.stop])
    raw = json.loads((tmp_path / "m/config.json").read_text())
    assert bits_of_weights(raw) == (4, 16)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    PUBLISHED["gptqmodel"].write(tmp_path / "m", FAMILIES["gpt-oss"])
    parts = ("qweight", "qzeros", "scales", "g_idx", "bias")
    missing = [f"model.layers.0.mlp.experts.down.5.{part}" for part in parts]
    edit_weights(tmp_path / "m", lambda tensors: [tensors.pop(name) for name in missing])
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.0\.mlp\.experts\.down\.5\.weight"):
        load(tmp_path / "m")


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("bitsandbytes-nf4", STATE, None, "the state of a weight of 4 bits is missing"),
        ("bitsandbytes-nf4", "weight.absmax", None, "unexpected: .*quant_map"),
        ("bitsandbytes-nf4", "weight", None, "missing: .*weight"),
        ("bitsandbytes-nf4", STATE, torch.zeros(9, dtype=torch.uint8), "is damaged"),
        ("bitsandbytes-nf4", "weight.absmax", torch.ones(3), "are no weight of"),
        ("bitsandbytes-int8", "SCB", torch.ones(3), "are no weight of 8 bits"),
        ("bitsandbytes-int8", "weight_format", torch.tensor(1, dtype=torch.uint8), "stored for one kind of GPU"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    name: str, tensor: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    PUBLISHED[name].write(tmp_path / "m", FAMILIES["Llama"])
    if value is None:
        edit_weights(tmp_path / "m", lambda tensors: tensors.pop(f"{UP}.{tensor}"))
    else:
        edit_weights(tmp_path / "m", lambda tensors: tensors.update({f"{UP}.{tensor}": value}))
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "m")


def bits_of_weights(raw: dict[str, Any]) -> tuple[int, int]:
    checkpoint = QuantizedCheckpoint(raw)
    return checkpoint.bits, checkpoint.held_bits


def test_other_containers_of_four_bits_are_refused() -> None:
    config = {"quantization_config": bitsandbytes(4, bnb_4bit_quant_storage="bfloat16")}
    with pytest.raises(UnsupportedModelError, match="4 bits in numbers of 'bfloat16' are not supported"):
        bits_of_weights(config)
    assert bits_of_weights({"quantization_config": bitsandbytes(4)}) == (4, 16)
    assert bits_of_weights({"quantization_config": bitsandbytes(8)}) == (8, 16)


def test_files_beside_the_config_say_nothing_where_the_config_does(tmp_path: Path) -> None:
    PUBLISHED["autogptq"].write(tmp_path / "m", FAMILIES["Llama"])
    expected = read_hf_config(tmp_path / "m")
    (tmp_path / "m/hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert read_hf_config(tmp_path / "m") == expected
