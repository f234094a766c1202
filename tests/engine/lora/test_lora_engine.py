"""Requests with adapters, and without, in one engine: the tokens of models with the adapters merged into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, InvalidRequestError
from common.lora.adapter_ref import AdapterRef
from engine.assembly import EngineParts, assemble
from engine.engine import Engine
from engine.lora.store import AdapterStore
from engine.request import Request, SamplingParams
from tests.engine.driving import GREEDY, engine_config, finish, num_drafts, random_prompt
from tests.engine.tiny_models import (
    TINY_MODELS,
    VOCAB_SIZE,
    TinyModel,
    reference_answers,
    reference_greedy,
    reference_logits,
)
from tests.harness.adapters import ALL_LINEAR, merge, write_adapter

pytestmark = pytest.mark.wing("engine.lora")
FLOAT32: dict[str, Any] = {"dtype": "float32", "quant_mode": "none"}
NUM_TOKENS = 8
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (13, 30, 22, 17)]


def open_engine(path: Path, **settings: Any) -> EngineParts:
    base = {"device": "cpu", "num_threads": 1, "num_gpu_blocks": 400, "block_size": 4, "enable_lora": True}
    return assemble(engine_config(str(path), **{**base, "max_num_batched_tokens": 24, "max_num_seqs": 8, **settings}))


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named if parameter.dim() == 2}


def write_adapters(folder: Path, tiny: TinyModel, all_linear: Sequence[str] = ALL_LINEAR) -> list[Path]:
    """Write an adapter of all linear layers, and one of some, with several ranks and rank-stabilized."""
    shapes = shapes_of(tiny.build())
    some = [name for name in all_linear if name not in ("k_proj", "up_proj")]
    return [
        write_adapter(folder / "all", shapes, all_linear, seed=1),
        write_adapter(
            folder / "some", shapes, some, seed=2, use_rslora=True, rank_pattern={some[0]: 2}, r=3, lora_alpha=2
        ),
    ]


def run(engine: Engine, asked: Sequence[tuple[list[int], Path | None]], params: SamplingParams) -> list[list[int]]:
    requests = [engine.add_request(prompt, params, adapter=name_of(folder)) for prompt, folder in asked]
    finish(engine)
    assert engine.kv.pool.num_used == 0
    return [request.output_token_ids for request in requests]


def name_of(folder: Path | None) -> str:
    return str(AdapterRef.of(folder)) if folder else ""


def store_of(engine: Engine) -> AdapterStore[Any]:
    assert isinstance(engine._adapters, AdapterStore)
    return engine._adapters


def merged_answers(tiny: TinyModel, asked: Sequence[tuple[list[int], Path | None]]) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    for folder in {folder for _, folder in asked}:
        model = tiny.build()
        if folder is not None:
            merge(model, folder)
        indices = [index for index, (_, own) in enumerate(asked) if own == folder]
        found = reference_answers(model, [asked[index][0] for index in indices], NUM_TOKENS)
        answers.update(zip(indices, found, strict=True))
    return [answers[index] for index in range(len(asked))]


GREEDY_8 = replace(GREEDY, max_tokens=NUM_TOKENS, ignore_eos=True)
INT8 = pytest.param("int8-weight", marks=pytest.mark.wing("engine.quantization"))
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
ATTENTION = ALL_LINEAR[:4]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ALL_LINEAR),
        ("llama-biases", ALL_LINEAR),
        ("llama-tied-sharded", ALL_LINEAR),
        ("qwen3", ALL_LINEAR),
        ("phi3", FUSED),
        ("phi3-short", FUSED),
        pytest.param("gemma3", ALL_LINEAR, marks=pytest.mark.wing("engine.windows")),
        pytest.param("gpt-oss", ATTENTION, marks=pytest.mark.wing("engine.windows")),
        pytest.param("qwen3-moe", ATTENTION, marks=pytest.mark.wing("engine.moe")),
    ],
)
def test_a_batch_of_adapters_equals_merged_models(name: str, targets: Sequence[str], tmp_path: Path) -> None:
    tiny = TINY_MODELS[name]
    first, second = write_adapters(tmp_path, tiny, targets)
    asked = [*zip(PROMPTS, (first, None, second, first), strict=True), (PROMPTS[0], second), (PROMPTS[0], None)]
    wanted = merged_answers(tiny, asked)
    assert len(set(map(tuple, (wanted[0], *wanted[4:])))) == 3, "adapters change the answer"
    engine = open_engine(tiny.save(tmp_path / "model"), **FLOAT32).engine
    assert run(engine, asked, GREEDY_8) == wanted
    assert run(engine, asked[::-1], GREEDY_8) == wanted[::-1]  # from the prefix cache


def test_embedding_and_output_projection(tmp_path: Path) -> None:
    """Rows of one step whose adapters change both, one of them, and neither; drafts are verified with the adapter."""
    tiny = TINY_MODELS["llama-tied-sharded"]
    model = tiny.build()
    shapes = {**shapes_of(model), "lm_head.weight": (VOCAB_SIZE, 48)}
    both = write_adapter(tmp_path / "both", shapes, ("embed_tokens", "lm_head", "q_proj"), seed=1)
    head = write_adapter(tmp_path / "head", shapes, ("lm_head", "down_proj"), seed=2)
    table = write_adapter(tmp_path / "table", shapes, ("embed_tokens",), seed=3)
    asked = [*zip(PROMPTS, (both, head, None, table), strict=True), (PROMPTS[0], head), (PROMPTS[0], None)]
    untied = TinyModel(tiny.family)  # transformers merges into separate weights

    def answers(folder: Path | None, prompt: list[int]) -> list[int]:
        merged = untied.build()
        tied = tiny.build().state_dict()
        merged.load_state_dict({**tied, "lm_head.weight": tied["model.embed_tokens.weight"]})
        if folder is not None:
            merge(merged, folder)
        return reference_greedy(merged, prompt, NUM_TOKENS)

    wanted = [answers(folder, prompt) for prompt, folder in asked]
    path = tiny.save(tmp_path / "model")
    assert run(open_engine(path, **FLOAT32).engine, asked, GREEDY_8) == wanted
    drafting = open_engine(path, **FLOAT32, num_speculative_tokens=3, ngram_min=1, adaptive_drafts=False).engine
    assert run(drafting, asked, GREEDY_8) == wanted
    assert num_drafts(drafting)[0] > 0
    with pytest.raises(InvalidRequestError, match="prompt_logprobs is not supported with an adapter of the output"):
        run(drafting, asked[:1], replace(GREEDY_8, prompt_logprobs=1))


@pytest.mark.parametrize("quant_mode", ["none", INT8])
def test_bfloat16_and_quantized_weights(quant_mode: str, tmp_path: Path) -> None:
    """Answers are as close to the merged model in float32 as those of an engine of the merged weights."""
    tiny, prompt = TINY_MODELS["llama"], random_prompt(200, VOCAB_SIZE, 7)
    (folder, _) = write_adapters(tmp_path, tiny)
    quantized = ("_proj.weight", "head.weight") if quant_mode != "none" else ()
    model = tiny.build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(as_held(weight, name.endswith(quantized)))
    merge(model, folder)
    model.save_pretrained(tmp_path / "merged")
    wanted = reference_logits(model, prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]

    def error(path: Path, mode: str, adapter: str) -> float:
        engine = open_engine(path, quant_mode=mode).engine
        engine.add_request(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=0), adapter=adapter)
        found = torch.tensor([each.logprob for output in finish(engine) for each in output.prompt_logprobs])
        return float((found - wanted).abs().mean())

    noise = error(tmp_path / "merged", "none", "")
    assert 0 < error(tiny.save(tmp_path / "model"), quant_mode, name_of(folder)) < 1.25 * noise < 0.1


def as_held(weight: torch.Tensor, is_quantized: bool) -> torch.Tensor:
    """Return the values that an engine computes with in bfloat16."""
    weight = weight.bfloat16()
    if not is_quantized:
        return weight
    from engine.layers.linear import Linear
    from engine.quantization.cpu_linears import int8_weight, quantize_int8

    values, scales = quantize_int8(weight)
    return int8_weight(Linear(values, scales=scales))


def test_an_answer_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """In bfloat16, log-probabilities have the same bits alone and among other requests in steps of other sizes."""
    tiny = TINY_MODELS["llama"]
    first, second = write_adapters(tmp_path, tiny)
    path = tiny.save(tmp_path / "model")
    params = replace(GREEDY_8, logprobs=3)
    asked = [*zip(PROMPTS, (first, None, second, first), strict=True)]

    def logprobs(together: bool, **settings: Any) -> list[list[Any]]:
        engine = open_engine(path, quant_mode="none", prefix_cache=False, **settings).engine
        found: dict[Request, list[Any]] = {}
        for batch in [asked] if together else [[each] for each in asked]:
            for prompt, folder in batch:
                found[engine.add_request(prompt, params, adapter=name_of(folder))] = []
            for output in finish(engine):
                found[output.request] += output.logprobs
        return [*found.values()]

    alone = logprobs(False)
    assert logprobs(True) == alone
    assert logprobs(True, max_num_batched_tokens=9) == alone


def test_the_least_recently_used_adapter_leaves_and_comes_back(tmp_path: Path) -> None:
    """With one slot, also while requests of several adapters run."""
    tiny = TINY_MODELS["llama"]
    first, second = write_adapters(tmp_path, tiny)
    asked = [*zip(PROMPTS, (first, second, None, first), strict=True)]
    wanted = merged_answers(tiny, asked)
    engine = open_engine(tiny.save(tmp_path / "model"), **FLOAT32, max_loras=1).engine
    assert run(engine, asked, GREEDY_8) == wanted
    roots = {name_of(each): engine.kv.prefixes._root(name_of(each), "") for each in (first, second)}
    engine.kv.pool.take_events()
    for each, tokens in zip(asked, wanted, strict=True):
        before = [*store_of(engine)._loads]
        assert run(engine, [each], GREEDY_8) == [tokens]
        stored, removed = engine.kv.pool.take_events()  # a router learns who has which adapter
        after = [*store_of(engine)._loads]
        assert {*stored} & {*roots.values()} == {roots[name] for name in after if name not in before}
        assert {*removed} & {*roots.values()} == {roots[name] for name in before if name not in after}
    figures = engine.figures()
    assert figures["mini_infer_lora_adapters"] == [1]
    assert figures["mini_infer_lora_loads"][0] >= 4
    assert len(figures["mini_infer_lora_load_seconds"]) == figures["mini_infer_lora_loads"][0]
    assert engine.figures()["mini_infer_lora_load_seconds"] == []


def test_adapters_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """They are refused when the request arrives. A file that cannot be read later fails the request in its step."""
    tiny = TINY_MODELS["llama"]
    first, second = write_adapters(tmp_path, tiny)
    path = tiny.save(tmp_path / "model")
    engine = open_engine(path, **FLOAT32, max_lora_rank=3).engine

    def refusal(name: str) -> str:
        with pytest.raises(InvalidRequestError) as refused:
            engine.add_request(PROMPTS[0], GREEDY_8, adapter=name)
        assert refused.value.param == "model"
        return str(refused.value)

    assert "rank 4, workers were started with --max-lora-rank 3" in refusal(name_of(first))
    assert "does not refer to an adapter" in refusal("poet")
    gone = AdapterRef("0" * 32, tmp_path / "gone")
    assert refusal(str(gone)).startswith("gone has no adapter_config.json")  # without its path, since clients see it
    assert "has changed since it was loaded" in refusal(f"{'0' * 32}:{second}")
    asked = [(PROMPTS[0], second), (PROMPTS[1], None)]
    assert run(engine, asked, GREEDY_8) == merged_answers(tiny, asked)
    weights = second / "adapter_model.safetensors"
    name = name_of(second)
    other = open_engine(path, **FLOAT32).engine
    store = store_of(other)
    read = store._read

    def cut_off(name: str, file: Any) -> Any:
        weights.write_bytes(weights.read_bytes()[:-100])
        return read(name, file)

    store._read = cut_off
    failing, whole = other.add_request(PROMPTS[0], GREEDY_8, adapter=name), other.add_request(PROMPTS[1], GREEDY_8)
    errors = []
    while other.has_work():
        errors += [(output.request, output.error) for output in other.step().outputs if output.error]
    assert [request for request, _ in errors] == [failing]
    assert "is damaged or cannot be read" in errors[0][1]
    assert [whole.output_token_ids] == merged_answers(tiny, [(PROMPTS[1], None)])


def test_modules_that_adapters_may_change(tmp_path: Path) -> None:
    tiny = TINY_MODELS["llama"]
    shapes = shapes_of(tiny.build())
    allowed = write_adapter(tmp_path / "allowed", shapes, ("q_proj", "v_proj"), seed=1)
    path = tiny.save(tmp_path / "model")
    engine = open_engine(path, **FLOAT32, lora_target_modules="q_proj,v_proj").engine
    asked = [(PROMPTS[0], allowed), (PROMPTS[1], None)]
    assert run(engine, asked, GREEDY_8) == merged_answers(tiny, asked)
    other = write_adapter(tmp_path / "other", shapes, ("q_proj", "down_proj"), seed=2)
    with pytest.raises(InvalidRequestError, match="down_proj, which --lora-target-modules of workers has to name"):
        run(engine, [(PROMPTS[0], other)], GREEDY_8)
    with pytest.raises(ConfigError, match="adapters cannot change q_prj, but down_proj, embed_tokens, gate_proj"):
        open_engine(path, lora_target_modules="q_prj")
