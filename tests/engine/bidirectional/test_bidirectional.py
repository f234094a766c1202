"""Models with bidirectional attention: vectors equal transformers', whatever other prompts share a step."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from common.lora.adapter_ref import AdapterRef
from engine.bidirectional.attention import QUERY_BLOCK, attend
from engine.models.hf_config import config_from_hf
from engine.prefill_backends.refusals import check_attention
from tests.engine.driving import finish, random_prompt
from tests.engine.gguf.gguf_files import WIDE, write_gguf
from tests.engine.pooling.test_vectors import LENGTHS, POOLED, assert_close, engine, prompts_of, run, vectors
from tests.engine.quantization.packed_files import FORMATS, TINY, write
from tests.engine.threaded_ranks import open_ranks, open_stages
from tests.engine.tiny_models import DEEPSEEK, GEMMA3, QWEN3_EXPERTS, SHAPE, VOCAB_SIZE, TinyModel
from tests.harness.adapters import deltas, write_adapter

BOTH_WAYS = {"is_causal": False}
MODELS = {
    "llama": TinyModel("Llama", BOTH_WAYS),
    "qwen2": TinyModel("Qwen2", BOTH_WAYS),
    "qwen3": TinyModel("Qwen3", {"head_dim": 12, **BOTH_WAYS}),
    "mistral with windows": TinyModel("Mistral", {"sliding_window": 11, **BOTH_WAYS}),
    "qwen3-moe": TinyModel("Qwen3Moe", {**QWEN3_EXPERTS, **BOTH_WAYS}),
    "embeddinggemma": TinyModel("Gemma3", {**GEMMA3, "use_bidirectional_attention": True}),
}


@torch.inference_mode()
def expected(name: str, prompts: Sequence[list[int]], pooling: str) -> list[Tensor]:
    model = MODELS[name].build().model
    states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    return [each[-1] if pooling == "last" else each.mean(dim=0) for each in states]


def saved(name: str, folder: Path) -> str:
    """Save the model without a head, as embedding models are published."""
    MODELS[name].build().model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.wing(wing)] if wing else [])
        for name in MODELS
        for wing in [{"qwen3-moe": "engine.moe", "embeddinggemma": "engine.windows"}.get(name)]
    ],
)
def test_vectors_equal_transformers(name: str, tmp_path: Path) -> None:
    """Runs all prompts in one step, and in steps that have room for only some of them."""
    prompts, model = prompts_of(), saved(name, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")
    for tokens_per_step in (0, max(LENGTHS)):
        made = engine(model, max_num_batched_tokens=tokens_per_step, max_num_seqs=4, num_gpu_blocks=256)
        for pooling in ("last", "mean"):
            assert_close(vectors(made, prompts, pooling), expected(name, prompts, pooling))
        made.kv.pool.check_integrity()
        assert made.num_failed_steps == 0


def test_each_token_sees_later_ones(llama: str, tmp_path: Path) -> None:
    """Neither the oracle nor our model is causal."""
    made, causal = engine(llama), engine(str(TinyModel("Llama").save(tmp_path)))
    one, other = [5, 6, 7, 8], [5, 6, 7, 9]
    mean = replace(POOLED, pooling="mean")
    assert vectors(made, [one], "mean")[0].allclose(expected("llama", [one], "mean")[0], atol=1e-4)
    assert not vectors(made, [one], "mean")[0].allclose(vectors(causal, [one], "mean")[0], atol=1e-2)
    assert run(made, [one, other], mean.pooling)[0][1].num_cached_tokens == 0


def test_the_same_bits_in_any_company(llama: str) -> None:
    made = engine(llama, dtype="bfloat16")
    alone = [vectors(made, [prompt], "mean")[0] for prompt in prompts_of()]
    together = vectors(made, prompts_of(), "mean")
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"preemption": "swap", "host_tier_gb": 0.01, "itl_objective_ms": 1.0},
            marks=[pytest.mark.wing("kvstore.tier"), pytest.mark.wing("engine.objectives")],
        ),
    ],
)
def test_more_urgent_prompts_cut_none(settings: dict[str, Any], llama: str) -> None:
    """They arrive between full steps and are served before those that wait."""
    made = engine(llama, max_num_batched_tokens=60, max_num_seqs=8, num_gpu_blocks=16, **settings)
    prompts = [random_prompt(length, VOCAB_SIZE, length) for length in (40, 30, 59, 7, 60, 20)]
    requests, outputs = [], []
    for index, prompt in enumerate(prompts):
        requests.append(made.add_request(prompt, replace(POOLED, pooling="mean"), priority=-index))
        if index % 2:
            outputs += made.step().outputs
    found = {output.request: output.logprobs[0].top_logprobs for output in outputs + finish(made)}
    assert_close([torch.tensor(found[each]) for each in requests], expected("llama", prompts, "mean"))


@pytest.mark.wing("engine.quantization")
def test_quantized_weights_give_near_vectors(llama: str) -> None:
    found = vectors(engine(llama, dtype="bfloat16", quant_mode="int8-weight"), prompts_of(), "mean")
    for ours, theirs in zip(found, expected("llama", prompts_of(), "mean"), strict=True):
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.995


def test_ranks(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_ranks(Path(llama), 2, monkeypatch, max_num_batched_tokens=64, block_size=8).engine
    assert_close(vectors(made, prompts_of(), "mean"), expected("llama", prompts_of(), "mean"))


@pytest.mark.wing("engine.windows")
def test_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage knows which of its layers have a window."""
    made = open_stages(Path(saved("embeddinggemma", tmp_path)), 2, monkeypatch, num_gpu_blocks=256).engine
    assert_close(vectors(made, prompts_of(), "mean"), expected("embeddinggemma", prompts_of(), "mean"))


@pytest.mark.usefixtures("forked_followers")
@pytest.mark.wing("engine.expert_balancing")
def test_ranks_of_placed_experts(tmp_path: Path) -> None:
    """Ranks are processes, whose experts are counted, placed by these counts, replicated and moved."""
    path, loads = saved("qwen3-moe", tmp_path / "m"), tmp_path / "loads.json"
    settings: dict[str, Any] = {"tp": 2, "expert_parallel": True, "expert_exchange": "dispatch"}
    settings |= {"num_redundant_experts": 2, "expert_rebalance_interval": 1}
    for more in ({"expert_load_file": str(loads)}, {"expert_placement": str(loads)}):
        made = engine(path, **settings, **more)
        assert_close(vectors(made, prompts_of(), "mean"), expected("qwen3-moe", prompts_of(), "mean"))
        del made
        gc.collect()


@pytest.mark.wing("engine.lora")
def test_adapters(llama: str, tmp_path: Path) -> None:
    stored = load_file(Path(llama) / "model.safetensors")
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in stored.items() if tensor.dim() == 2}
    folder = write_adapter(tmp_path / "own", shapes, std=0.2)
    shutil.copytree(llama, tmp_path / "merged")
    merged = {n: t + deltas(folder).get(f"model.{n}", torch.zeros(())) for n, t in stored.items()}
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    wanted = vectors(engine(str(tmp_path / "merged")), prompts_of(), "mean")
    made = engine(llama, enable_lora=True)
    _, found = run(made, prompts_of(), "mean", adapter=str(AdapterRef.of(folder)))
    assert_close(found, wanted)
    plain = vectors(made, prompts_of(), "mean")
    assert not torch.allclose(plain[0], wanted[0], atol=1e-2), "adapters change the vectors"


@pytest.mark.wing("engine.gguf")
@pytest.mark.parametrize("is_packed", [False, True])
def test_files_of_few_bits(is_packed: bool, tmp_path: Path) -> None:
    """Vectors of such GGUF files and of quantized checkpoints equal those of the dequantized weights."""
    if is_packed:
        model = write(FORMATS["gptq"], tmp_path / "m", replace(TINY, changes={**TINY.changes, **BOTH_WAYS}))
        path = tmp_path / "m"
    else:
        model, path = TinyModel("Llama", {**WIDE, **BOTH_WAYS}).build(), tmp_path / "m.gguf"
        write_gguf(path, model, "llama", "F32")
    made, prompts = engine(str(path), quant_mode="none"), prompts_of()
    with torch.inference_mode():
        states = [model.model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0) for prompt in prompts]
    assert_close(vectors(made, prompts, "mean"), states)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_it_generates_nothing(llama: str) -> None:
    made = engine(llama)
    with pytest.raises(InvalidRequestError, match="gives vectors, and no text") as caught:
        made.add_request([1, 2], POOLED)
    assert caught.value.param == "model"
    assert not made.has_work()


def test_a_prompt_fits_into_one_step(llama: str) -> None:
    """By default the context fits; otherwise the tokens of a step bound it, even if a larger one is asked for."""
    assert engine(llama).max_model_len == 256
    made = engine(llama, max_num_batched_tokens=16, max_num_seqs=4)
    longest = random_prompt(16, VOCAB_SIZE, 16)
    assert_close(vectors(made, [longest], "mean"), expected("llama", [longest], "mean"))
    with pytest.raises(ContextLengthError):
        made.add_request([*longest, 1], replace(POOLED, pooling="mean"))
    with pytest.raises(ConfigError, match="choose at most 17, or raise --max-num-batched-tokens to 19"):
        engine(llama, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)


def test_what_no_such_model_has(llama: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: LlamaModel caches nothing"):
        engine(llama, dtype="bfloat16", kv_cache_dtype="fp8")
    raw = {**SHAPE, "architectures": ["LlamaModel"], **BOTH_WAYS}
    with pytest.raises(ConfigError, match="--attention-backend triton knows no attention to later tokens"):
        check_attention(config_from_hf(raw), "triton")


@pytest.mark.wing("engine.mla")
def test_latents_are_refused(tmp_path: Path) -> None:
    path = TinyModel("DeepseekV2", {**DEEPSEEK, "head_dim": 8, **BOTH_WAYS}).save(tmp_path)
    with pytest.raises(UnsupportedModelError, match="latent attention to later tokens"):
        engine(str(path))


@pytest.mark.wing("engine.transformers_models")
def test_transformers_code_is_refused(tmp_path: Path) -> None:
    """Only its masks are bidirectional, and our attention does not read them."""
    path = str(MODELS["llama"].save(tmp_path))
    with pytest.raises(
        UnsupportedModelError, match="attention to later tokens is computed by our own families alone"
    ):
        engine(path, model_impl="transformers")


# -- attention alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 2, 100, QUERY_BLOCK + 7, 2 * QUERY_BLOCK])
@pytest.mark.parametrize("num_tokens", [1, 3, QUERY_BLOCK, 2 * QUERY_BLOCK + 1])
def test_attention_is_its_formula(num_tokens: int, window: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    q = torch.randn(num_tokens, 4, 8, generator=generator)
    keys, values = torch.randn(2, 2, num_tokens, 8, generator=generator)
    places = torch.arange(num_tokens)
    scores = torch.einsum("qhd,hkd->hqk", q, keys.repeat_interleave(2, 0)) / 8**0.5
    if window:
        scores.masked_fill_((places[:, None] - places).abs() >= window, float("-inf"))
    wanted = torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values.repeat_interleave(2, 0))
    torch.testing.assert_close(attend(q, keys, values, window), wanted, rtol=1e-4, atol=1e-5)
