"""Quantized checkpoints loaded as usual: logits equal those of the dequantized weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from common.model_files import resolve_model
from engine.config import EngineConfig
from engine.cpu_gemms.gemms import half
from engine.layers.linear import Linear
from engine.loader.load import LoadedModel
from engine.quantization.cpu_linears import int8
from kernels.gguf.library import library
from tests.engine.driving import generate, open_model, random_prompt
from tests.engine.quantization.packed_files import FORMATS, TINY, VOCAB_SIZE, Format, write
from tests.engine.tiny_models import TinyModel, edit_config, edit_weights, reference_logits
from tests.kernels.helpers import relative_error

PROMPT = random_prompt(20, VOCAB_SIZE, 3)
UP = "model.layers.1.mlp.up_proj"
Tensors = dict[str, Tensor]


def load(path: Path, **settings: str) -> tuple[LoadedModel, EngineConfig]:
    return open_model(resolve_model(str(path)), num_threads=1, **settings)


def logits(path: Path, chunk: int, prompt: list[int] = PROMPT, **settings: str) -> tuple[Tensor, LoadedModel]:
    """Return the logits after the prompt, which is computed in chunks of `chunk`."""
    loaded, config = load(path, **settings)
    return generate(loaded, config, prompt, chunk=chunk)[1][0].float(), loaded


def first_qkv(loaded: LoadedModel) -> Linear:
    return next(ref.layer for ref in loaded.model.linears() if ref.attribute == "qkv")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_what_its_weights_say(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMATS[name]
    model = write(form, tmp_path / "m")
    exact = reference_logits(model, PROMPT)[-1]
    result, loaded = logits(tmp_path / "m", 13, dtype="float32")
    assert loaded.quant_mode == "none"
    torch.testing.assert_close(result, exact, atol=1e-4, rtol=0)
    plain = logits(tmp_path / "m", 20, dtype="bfloat16", quant_mode="none")[0]
    rounded_to_int8 = "of" in form.maps or name == "awq-one-map-plain"  # besides the output projection
    bound = 1.5 * relative_error(plain, exact) + (0.05 if rounded_to_int8 else 0.02)
    with caplog.at_level("INFO"):
        loaded, config = load(tmp_path / "m", dtype="bfloat16")
    assert loaded.quant_mode == form.label
    for chunk in (1, 20):
        # The prompt by dequantized copies, however it is cut, and the token after it by the GEMMs for few rows.
        tokens, found = generate(loaded, config, PROMPT, 2, chunk)
        for result, wanted in zip(found.float(), reference_logits(model, PROMPT + tokens[:1])[-2:], strict=True):
            assert relative_error(result, wanted) < bound
    assert f"{form.label}: linear layers are" in caplog.text
    assert form.maps in caplog.text


def test_shards_may_part_the_tensors_of_a_map(tmp_path: Path) -> None:
    for name in ("gptq-act-order", "compressed-int4-asymmetric"):
        exact = reference_logits(write(FORMATS[name], tmp_path / name, num_shards=3), PROMPT)[-1]
        result, _ = logits(tmp_path / name, 20, dtype="float32")
        torch.testing.assert_close(result, exact, atol=1e-4, rtol=0)


def test_fingerprints_tell_how_weights_are_held(tmp_path: Path) -> None:
    for name in ("gptq", "gptq-v2"):
        write(FORMATS[name], tmp_path / name)
    loaded = [
        load(tmp_path / "gptq")[0],
        load(tmp_path / "gptq", quant_mode="none")[0],
        load(tmp_path / "gptq", quant_mode="int8-weight")[0],
        load(tmp_path / "gptq-v2")[0],
    ]
    assert [model.quant_mode for model in loaded] == ["gptq-4bit", "none", "int8-weight", "gptq-4bit"]
    assert len({model.fingerprint for model in loaded}) == 4
    assert load(tmp_path / "gptq")[0].fingerprint == loaded[0].fingerprint


def test_fingerprints_tell_what_became_of_the_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(FORMATS["gptq"], tmp_path / "m")
    first = load(tmp_path / "m")[0].fingerprint
    monkeypatch.setattr("engine.quantization.cpu_linears.CPU_GROUP_SIZES", ())  # a machine without this product
    assert load(tmp_path / "m")[0].fingerprint != first


@pytest.mark.parametrize("kept_plain", [("embed_tokens",), ()])
def test_a_tied_embedding_serves_as_output_projection(kept_plain: tuple[str, ...], tmp_path: Path) -> None:
    tiny = TinyModel("Qwen2", {**TINY.changes, "tie_word_embeddings": True})
    form = replace(FORMATS["compressed-int4"], kept_plain=kept_plain)
    exact = reference_logits(write(form, tmp_path / "m", tiny), PROMPT)[-1]
    torch.testing.assert_close(logits(tmp_path / "m", 20, dtype="float32")[0], exact, atol=1e-4, rtol=0)
    result, loaded = logits(tmp_path / "m", 20)
    assert relative_error(result, exact) < 0.1
    head = loaded.model.head
    assert head.gemm is half
    assert torch.equal(torch.ops.quantized.linear_unpack_fp16(head.weight)[0], loaded.model.embedding.float())


def test_parts_that_are_quantized_differently_are_computed_alike(tmp_path: Path) -> None:
    """GPTQ with an order of its own for each of q, k and v, and with widths that differ by name."""
    base, turn = FORMATS["gptq-act-order"], iter(range(1000))

    def shuffled(weight: Tensor) -> tuple[Tensors, Tensor]:
        # Swapping columns of the weight before and after packing gives every map another order.
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(next(turn)))
        tensors, rounded = base.pack(weight[:, order])
        back = torch.argsort(order)
        codes = torch.stack([tensors["qweight"] >> 4 * place & 15 for place in range(8)], 1).flatten(0, 1)[back]
        words = torch.stack([codes[place::8].long() << 4 * place for place in range(8)]).sum(0)
        tensors["qweight"] = (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
        tensors["g_idx"] = tensors["g_idx"][back]
        return tensors, rounded[:, back]

    exact = reference_logits(write(replace(base, pack=shuffled), tmp_path / "m"), PROMPT)[-1]
    torch.testing.assert_close(logits(tmp_path / "m", 20, dtype="float32")[0], exact, atol=1e-4, rtol=0)
    result, loaded = logits(tmp_path / "m", 1)
    assert first_qkv(loaded).gemm is int8
    assert relative_error(result, exact) < 0.1

    def mixed(weight: Tensor) -> tuple[Tensors, Tensor]:
        return FORMATS["gptq-8bit" if weight.shape[1] == 128 else "gptq"].pack(weight)

    config = {**FORMATS["gptq"].config, "dynamic": {"-:.*head": {}, "+:.*down_proj": {"bits": 8}}}
    exact = reference_logits(write(replace(base, config=config, pack=mixed), tmp_path / "mixed"), PROMPT)[-1]
    torch.testing.assert_close(logits(tmp_path / "mixed", 20, dtype="float32")[0], exact, atol=1e-4, rtol=0)


def test_random_weights_are_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(FORMATS["gptq"], tmp_path / "m")
    with caplog.at_level("INFO"):
        loaded, _ = load(tmp_path / "m", load_format="dummy")
    assert loaded.quant_mode == ("int8-weight" if library() is None else "q8_0")
    assert "random weights are plain, not gptq-4bit" in caplog.text


def test_biases_of_zeros_that_nobody_needs_are_left_out(tmp_path: Path) -> None:
    form = FORMATS["gptq"]
    write(form, tmp_path / "m")

    def add_bias(value: float) -> None:
        edit_weights(tmp_path / "m", lambda tensors: tensors.update({f"{UP}.bias": torch.full((128,), value)}))

    add_bias(0.0)
    load(tmp_path / "m")
    add_bias(0.5)
    with pytest.raises(ConfigError, match=r"up_proj\.bias is not zero"):
        load(tmp_path / "m")


def test_scales_of_inputs_and_of_the_kv_cache_are_left_out(tmp_path: Path) -> None:
    write(FORMATS["fp8-tensor"], tmp_path / "m")
    expected, _ = logits(tmp_path / "m", 20)
    scales = {f"{UP}.input_scale": torch.full((1,), 3.0), "model.layers.0.self_attn.k_scale": torch.full((1,), 3.0)}
    edit_weights(tmp_path / "m", lambda tensors: tensors.update(scales))
    assert torch.equal(logits(tmp_path / "m", 20)[0], expected)


def put(part: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{UP}.{part}": value})


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


WRONG = {
    "missing scales": (
        "gptq",
        drop("scales"),
        r"quantized weights: model\.layers\.1\.mlp\.up_proj: scales is missing",
    ),
    "missing codes": ("gptq", drop("qweight"), r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
    "short codes": ("gptq", put("qweight", torch.zeros(7, 128).int()), r"qweight is \[7, 128\], not \[8, 128\]"),
    "three dimensions": ("awq", put("qzeros", torch.zeros(2, 4, 4).int()), r"qzeros is \[2, 4, 4\], not \[2, 16\]"),
    "codes of another type": ("awq", put("qweight", torch.zeros(64, 16)), "qweight holds F32, not I32"),
    "a group that is not there": (
        "gptq",
        put("g_idx", torch.full((64,), 9).int()),
        "g_idx does not divide 64 inputs",
    ),
    "negative groups": ("gptq", put("g_idx", torch.arange(64).int() - 5), "g_idx does not divide 64 inputs"),
    "a lying shape": ("compressed-int4", put("weight_shape", torch.tensor([1 << 60, 3])), "weight_shape is"),
    "scales that are not numbers": ("awq", put("scales", torch.full((2, 128), torch.nan).half()), "not a number"),
    "no scale": ("compressed-int8", drop("weight_scale"), "holds I8 numbers"),
    "scales for other blocks": ("fp8-blocks", put("weight_scale_inv", torch.ones(4, 4)), r"not \[3, 2\]"),
    "e5m2": ("fp8-tensor", put("weight", torch.zeros(128, 64).to(torch.float8_e5m2)), "F8_E5M2, not F8_E4M3"),
    "something more": ("awq", put("perm", torch.zeros(3)), r"unexpected: model\.layers\.1\.mlp\.up_proj\.perm"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    form, change, message = WRONG[name]
    write(FORMATS[form], tmp_path / "m")
    edit_weights(tmp_path / "m", change)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "m")


def test_config_and_tensors_must_agree(tmp_path: Path) -> None:
    form: Format = FORMATS["gptq"]
    write(replace(form, config={**form.config, "group_size": 64}), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"qzeros is \[2, 8\], not \[1, 8\].* and 16 more") as caught:
        load(tmp_path / "m")
    assert "missing" not in str(caught.value)  # biases are there
    edit_config(tmp_path / "m", quantization_config=None)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(tmp_path / "m")


def damage(path: Path, weights: bytes, config: str, seed: int) -> None:
    """Damage a file by its seed: bytes of the header, its numbers, the file's end, a value of the config."""
    draw, header_end = random.Random(seed), 8 + int.from_bytes(weights[:8], "little")
    changed, values = bytearray(weights), json.loads(config)
    match seed % 4:
        case 0:
            changed[draw.randrange(header_end)] = draw.randrange(256)
        case 1:
            digits = [place for place in range(8, header_end) if chr(changed[place]).isdigit()]
            changed[draw.choice(digits)] = ord("0") + draw.randrange(10)
        case 2:
            del changed[draw.randrange(len(changed)) :]
        case _:
            place = values["quantization_config"]
            while isinstance(inner := place[draw.choice(list(place))], dict) and inner:
                place = inner
            place[draw.choice(list(place))] = draw.choice([None, -1, 0, 3, "x", [], {}, [1, 2], True, 1e9])
    (path / "model.safetensors").write_bytes(changed)
    (path / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-blocks", "compressed-int4-asymmetric"])
def test_damage_ends_in_one_kind_of_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(FORMATS[name], path)
    weights, config = (path / "model.safetensors").read_bytes(), (path / "config.json").read_text()
    num_refused = 0
    for seed in range(40):
        damage(path, weights, config, seed)
        try:
            load(path)
        except ConfigError:
            num_refused += 1
    assert num_refused > 20
