"""Models and settings that `--model-impl transformers` refuses, each with the reason."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.errors import ConfigError, UnsupportedModelError
from engine.loader.load import load_model
from engine.transformers_models.isolation import check_isolation
from engine.transformers_models.seam import NAME, Call, require_transformers
from tests.engine.driving import directory, engine_config
from tests.engine.tiny_models import TINY_MODELS, edit_config
from tests.engine.transformers_models.hf_families import FAMILIES, SHAPE, HfFamily
from tests.engine.transformers_models.test_generate import open_engine

pytestmark = pytest.mark.slow

OUTSIDE = "its tokens see each other outside its attention"
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_d_state": 8}
REFUSED: dict[str, tuple[HfFamily, str]] = {
    "positions by a bias (alibi)": (HfFamily("bloom", {"n_layer": 2}, kv_heads=False), "0 of its 2 layers attend"),
    "attention by a table of its own": (
        HfFamily("gptj", {"rotary_dim": 4}, kv_heads=False), "its attention does not go through"
    ),
    "an encoder's decoder": (HfFamily("bart", kv_heads=False), "it attends 12 times in 2 layers"),
    "windows of masks": (
        HfFamily("phimoe", {"sliding_window": 11, "num_local_experts": 4}), "its windows are known to masks alone"
    ),
    "a state alone": (HfFamily("mamba", kv_heads=False), "it has layers of linear_attention"),
    "a state beside attention": (HfFamily("falcon_h1", MAMBA), "it has layers of hybrid"),
    "convolutions": (HfFamily("lfm2", {"layer_types": ["full_attention", "conv"]}), "it has layers of conv"),
    "chunks": (
        HfFamily("llama4_text", {"attention_chunk_size": 8, "head_dim": 12}), "it has layers of chunked_attention"
    ),
    "two attentions in a layer": (HfFamily("diffllama"), "a layer attends more than once"),
    "a mask of its own": (HfFamily("doge", {"head_dim": 12}), "its attention takes a mask of its own"),
    "later tokens": (HfFamily("bert", kv_heads=False), "its attention sees later tokens"),
    "rotation that follows the batch": (
        HfFamily("stablelm", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
                                                  "partial_rotary_factor": 0.5}}),
        r"its rotary embedding \(dynamic or longrope\) follows the longest sequence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    family, reason = REFUSED[name]
    path = family.save(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=f"^--model-impl transformers: .* is not supported: {reason}"):
        open_engine(path)


def test_encoders_are_refused(tmp_path: Path) -> None:
    transformers.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="it is an encoder and a decoder; decoders alone are served"):
        open_engine(tmp_path)


@pytest.mark.parametrize("what", ["a state", "positions of its own"])
def test_what_no_config_tells_of_is_refused(what: str) -> None:
    require_transformers("this test")
    hf: Any = FAMILIES["gpt2"].build()
    hf.set_attn_implementation(NAME)

    def leak(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        places = torch.arange(output.shape[1])[None, :, None]
        return output + 0.1 * (output.roll(1, dims=1) if what == "a state" else places * output)

    with torch.no_grad():
        check_isolation(hf, 97, 160)
        hf.transformer.h[1].mlp.register_forward_hook(leak)
        with pytest.raises(UnsupportedModelError, match=OUTSIDE):
            check_isolation(hf, 97, 160)


def test_auto_runs_what_our_own_code_does_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpt_neox, llama = FAMILIES["gpt_neox"].save(tmp_path / "neox"), TINY_MODELS["llama"].save(tmp_path / "llama")
    own, known = open_engine(llama, model_impl="auto"), "architecture 'GPTNeoXForCausalLM' is not supported"
    assert type(own.runner).__name__ == "CpuRunner"
    assert type(open_engine(llama).runner).__name__ == "TransformersRunner"
    with caplog.at_level("INFO"):
        assert type(open_engine(gpt_neox, model_impl="auto").runner).__name__ == "TransformersRunner"
    assert "GPTNeoXForCausalLM runs by the code of transformers" in caplog.text
    with pytest.raises(UnsupportedModelError, match=known):
        open_engine(gpt_neox, model_impl="mini-infer")
    with pytest.raises(UnsupportedModelError, match=rf"{known}.*; nor by transformers' code: .* leave .*--tp"):
        open_engine(gpt_neox, model_impl="auto", tp=2)


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    path, config = FAMILIES["gpt_neox"].save(tmp_path / "m"), engine_config(model_impl="transformers")
    with pytest.raises(UnsupportedModelError, match=r"runs on CPUs alone here: use --device cpu"):
        load_model(directory(path), config, torch.device("cuda"))


def test_files_without_a_config_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--model-impl transformers needs a directory with config\.json"):
        open_engine(Path("dry-run"))


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    path = FAMILIES["gpt_neox"].save(tmp_path / "m")
    edit_config(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="quantized checkpoints are read by our own families alone"):
        open_engine(path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = FAMILIES["gpt_neox"].save(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.bias"
    rest = {key: value for key, value in weights.items() if key != name}
    save_file({**rest, "other.weight": weights[name]}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"do not fit.*missing: {name}; unexpected: other\.weight"):
        open_engine(path)
    (path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="the weights of m cannot be read"):
        open_engine(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors files"):
        open_engine(path)


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=rf"transformers {transformers.__version__} cannot read its config"
    ):
        open_engine(tmp_path)
    bert = transformers.AutoConfig.for_model(
        "gpt_neox", **{**SHAPE, "architectures": ["GPTNeoXForTokenClassification"]}
    )
    bert.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="transformers has no causal language model of that name"):
        open_engine(tmp_path)


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = FAMILIES["gpt_neox"].save(tmp_path / "m"), builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    extra = r"needs the package transformers: pip install 'mini-infer\[transformers\]'"
    with pytest.raises(ConfigError, match=f"^--model-impl transformers {extra}"):
        open_engine(path)
    with pytest.raises(UnsupportedModelError, match=f"'GPTNeoXForCausalLM' is not supported .*{extra}"):
        open_engine(path, model_impl="auto")


def test_what_attention_would_leave_out_is_refused_late_too(tmp_path: Path) -> None:
    """Some families select blocks of keys only for long sequences."""
    code = open_engine(FAMILIES["gpt_neox"].save(tmp_path / "m")).runner._model.code
    q, k, v = (torch.zeros(1, 4, 3, 12) for _ in "qkv")
    call = Call(code.hf.gpt_neox, q, k, v, None, 0.3, {"block_indices": torch.zeros(1)})
    with pytest.raises(UnsupportedModelError, match="its attention takes block_indices, which ours does not know"):
        code.blocks[1].attend(call, lambda _block, qkv: qkv)
