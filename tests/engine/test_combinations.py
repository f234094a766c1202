"""Several features at a time that are likely to be used together: the tokens of an engine without those that must
change none. tests/compatibility.toml says which pairs are tested here.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from common.grammar import grammar
from common.model_files import resolve_model
from common.text.load import load_tokenizer
from engine.assembly import EngineParts, assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loader import load
from engine.request import Request, SamplingParams, TokenLogprobs
from tests.engine.driving import num_drafts, random_prompt
from tests.engine.expert_balancing.balancing import balancing_of
from tests.engine.gguf.gguf_files import write_gguf
from tests.engine.gguf.test_gguf import FAMILIES, WIDE
from tests.engine.moe.test_moe import WIDE as WIDE_EXPERTS
from tests.engine.pipeline_parallel import test_pipeline
from tests.engine.quantization.packed_files import FORMATS, write
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.tensor_parallel.test_ranks import OF_RANKS, open_ranks
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.slow

WORDS = "([a-f]{3} )"
PLAIN = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
PARAMS = [replace(PLAIN, grammar=grammar.regex(WORDS + "{20}")), PLAIN, PLAIN, PLAIN]
PROMPTS = [random_prompt(length, VOCAB_SIZE, length) for length in (13, 17, 22, 30)]
FLOAT32: dict[str, Any] = {"dtype": "float32", "quant_mode": "none"}
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 4}
WHOLE_EXPERTS: dict[str, Any] = {"expert_parallel": True}
SWAP: dict[str, Any] = {"preemption": "swap", "host_tier_gb": 0.01}


def save_packed(folder: Path) -> Path:
    write(FORMATS["gptq"], folder)
    return folder


def save_gguf(folder: Path) -> Path:
    folder.mkdir()
    write_gguf(folder / "m.gguf", TinyModel("Llama", {**WIDE, "num_hidden_layers": 2}).build(), "llama", "Q4_1")
    return folder / "m.gguf"


# What writes a model, its settings, and blocks that hold the longest sequence, and not two of them.
MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], int]] = {
    "windows and experts": (TINY_MODELS["gpt-oss"].save, FLOAT32, 24),
    "latents and experts": (TINY_MODELS["deepseek-v3"].save, FLOAT32, 13),
    "packed": (save_packed, {}, 13),
    "packed, as int8": (save_packed, {"quant_mode": "int8-weight"}, 13),
    "gguf": (save_gguf, {}, 13),
}


@pytest.fixture(autouse=True)
def _byte_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no tokenizer, or none that a grammar can use."""
    monkeypatch.setattr(load, "load_tokenizer", lambda _: load_tokenizer(resolve_model("dry-run")))


def open_engine(path: Path, **settings: Any) -> EngineParts:
    base = {"device": "cpu", "num_threads": 1, "num_gpu_blocks": 400, **SMALL_STEPS}
    return assemble(EngineConfig(str(path), **{**base, **settings}))


def finish(made: Engine, requests: Sequence[Request]) -> list[list[TokenLogprobs]]:
    """Run to the end. Returns the log-probabilities of the requests' prompts."""
    found: dict[Request, list[TokenLogprobs]] = {request: [] for request in requests}
    while made.has_work():
        for output in made.step().outputs:
            assert output.error is None
            found[output.request] += output.prompt_logprobs
    assert made.num_failed_steps == 0
    made.kv.pool.check_integrity()
    return list(found.values())


def run(parts: EngineParts) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
    """All prompts at once, the first one's output in words: tokens, and log-probabilities of prompts."""
    requests = [parts.engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    wait_until(lambda: not requests[0].is_held)  # or the others might have ended before the first one's row
    logprobs = finish(parts.engine, requests)
    assert re.fullmatch(WORDS + "{4}", bytes(requests[0].output_token_ids).decode())
    return [request.output_token_ids for request in requests], logprobs


def use_drafts(monkeypatch: pytest.MonkeyPatch, outputs: Sequence[list[int]]) -> None:
    """About two of three drafts are right from now on."""
    answers = [prompt + tokens for prompt, tokens in zip(PROMPTS, outputs, strict=True)]
    drafter = MakeOracle(knows(answers), 0.7, VOCAB_SIZE)
    draft_with(monkeypatch, drafter)


def check(
    parts: EngineParts, tokens: list[list[int]], logprobs: list[list[TokenLogprobs]], is_swapped: bool = False
) -> None:
    """With drafts it gives these."""
    found, found_logprobs = run(parts)
    assert found == tokens
    assert_same(found_logprobs, logprobs)
    load = parts.engine.load()
    drafted, accepted = num_drafts(parts.engine)
    assert 0 < accepted < drafted
    if is_swapped:
        assert load.num_preemptions > 0


def assert_same(found: list[list[TokenLogprobs]], expected: list[list[TokenLogprobs]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_over_8_bit_blocks_that_are_swapped(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, settings, num_blocks = MODELS[name]
    path, settings = save(tmp_path / "m"), {**settings, "kv_cache_dtype": "fp8"}
    tokens, logprobs = run(open_engine(path, **settings))
    use_drafts(monkeypatch, tokens)
    made = open_engine(
        path, num_speculative_tokens=3, adaptive_drafts=False, **settings, **SWAP, num_gpu_blocks=num_blocks
    )
    check(made, tokens, logprobs, is_swapped=True)


@pytest.mark.parametrize("name", ["packed", "packed, as int8"])
def test_another_engine_goes_on_with_drafts_over_8_bit_blocks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is handed over as workers do it: blocks of a lease, copied to where there is room for them."""
    save, settings, _ = MODELS[name]
    path, settings = save(tmp_path / "m"), {**settings, "kv_cache_dtype": "fp8"}
    tokens, logprobs = run(open_engine(path, **settings))
    use_drafts(monkeypatch, tokens)
    prefill, decode = (
        open_engine(path, **settings),
        open_engine(path, num_speculative_tokens=3, adaptive_drafts=False, **settings),
    )
    for prompt, params, expected, of_prompt in zip(PROMPTS, PARAMS, tokens, logprobs, strict=True):
        sent = prefill.engine.add_request(prompt, params, prefill_only=True)
        assert_same(finish(prefill.engine, [sent]), [of_prompt])
        leased = prefill.engine.kv.detach(sent, sent.num_known_tokens - 1)
        request = decode.engine.add_request(
            prompt, params, output_token_ids=sent.output_token_ids, kv_source="lease", num_source_tokens=len(prompt)
        )
        [job] = decode.engine.step().loads
        decode.runner._pool[job.block_ids] = prefill.runner._pool[[leased[position] for position in job.positions]]
        decode.engine.finish_load(job, True)
        assert finish(decode.engine, [request]) == [[]]  # log-probabilities of the prompt came before
        assert request.output_token_ids == expected
    assert num_drafts(decode.engine)[1] > 0


def test_ranks_and_stages_with_drafts_and_8_bit_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "num_gpu_blocks": 64}
    tokens, logprobs = run(open_engine(Path("dry-run"), **FLOAT32, **settings))
    use_drafts(monkeypatch, tokens)
    settings["num_speculative_tokens"] = 3
    check(open_ranks(Path("dry-run"), 2, monkeypatch, itl_objective_ms=1000.0, **settings), tokens, logprobs)
    check(test_pipeline.open_stages(Path("dry-run"), 2, monkeypatch, **settings), tokens, logprobs)


def place_experts(monkeypatch: pytest.MonkeyPatch, loads: Path, layers: list[list[int]]) -> None:
    """Ranks dispatch tokens to whole experts from now on, placed by these loads, with two replicas."""
    loads.write_text(json.dumps({"num_experts": len(layers[0]), "layers": layers}))
    for setting, value in {
        "expert_parallel": True, "expert_exchange": "dispatch", "expert_placement": str(loads),
        "num_redundant_experts": 2,
    }.items():  # fmt: skip
        monkeypatch.setitem(OF_RANKS, setting, value)


def test_ranks_that_dispatch_to_placed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas, of a model with windows; drafts, objectives, and blocks that are swapped."""
    save, settings, num_blocks = MODELS["windows and experts"]
    path = save(tmp_path / "m")
    tokens, logprobs = run(open_engine(path, **settings))
    use_drafts(monkeypatch, tokens)
    place_experts(monkeypatch, tmp_path / "loads.json", [[90, 1, 40, 5, 5, 9]] * 4)
    made = open_ranks(
        path, 2, monkeypatch, num_speculative_tokens=3, adaptive_drafts=False, itl_objective_ms=1000.0,
        num_gpu_blocks=num_blocks, **SMALL_STEPS, **SWAP,
    )  # fmt: skip
    check(made, tokens, logprobs, is_swapped=True)


@pytest.mark.parametrize("mode", ["int8-weight", "int4-weight"])
def test_ranks_of_placed_and_quantized_experts(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, as bfloat16 rounds sums over ranks once more."""
    path, settings = WIDE_EXPERTS.save(tmp_path / "m"), {"dtype": "bfloat16", "quant_mode": mode}
    _, expected = run(open_engine(path, **settings))
    place_experts(monkeypatch, tmp_path / "loads.json", [[90, 1, 40, 5]] * 3)
    parts = open_ranks(path, 2, monkeypatch, **settings)
    assert parts.quantization == mode
    _, found = run(parts)
    pairs = zip(chain(*found), chain(*expected), strict=True)
    assert 0 < fmean(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs) < 0.05


def save_packed_experts(folder: Path) -> Path:
    write(FORMATS["gptq"], folder, WIDE_EXPERTS)
    return folder


def save_gguf_experts(folder: Path) -> Path:
    tiny, arch = FAMILIES["qwen3moe"]
    folder.mkdir()
    write_gguf(folder / "m.gguf", tiny.build(), arch)
    return folder / "m.gguf"


@pytest.mark.usefixtures("forked_followers")
@pytest.mark.parametrize(
    ("save", "settings"),
    [
        (TINY_MODELS["deepseek-v3"].save, {"kv_cache_dtype": "fp8"}),
        (save_packed_experts, {}),
        (save_gguf_experts, {}),
    ],
    ids=["latents over 8-bit blocks", "packed", "gguf"],
)
def test_ranks_that_count_and_move_placed_experts(
    save: Callable[[Path], Path], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes: the tokens of ranks whose experts stay where they were without counts. Without a grammar, for which
    the others would need the tokenizer, too.
    """
    path, loads, counted = save(tmp_path / "m"), tmp_path / "loads.json", tmp_path / "counted.json"
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_CHOICES_A_SLOT", 1)
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_GAIN", 1.0)
    base = {"tp": 2, "expert_parallel": True, "expert_exchange": "dispatch", **FLOAT32, **settings}

    def answer(**more: Any) -> tuple[list[list[int]], int]:
        """Tokens, and how often experts moved."""
        parts = open_engine(path, **base, **more)
        requests = [parts.engine.add_request(prompt, PLAIN) for prompt in PROMPTS]
        finish(parts.engine, requests)
        rebalancer = balancing_of(parts).rebalancer
        return [request.output_token_ids for request in requests], rebalancer.num_changes if rebalancer else 0

    tokens, _ = answer(expert_load_file=str(loads))
    gc.collect()  # the counts are written when the engine ends
    placed = {"expert_placement": str(loads), "num_redundant_experts": 2, "expert_rebalance_interval": 3}
    found, num_changes = answer(**placed, expert_load_file=str(counted))
    assert found == tokens
    assert num_changes > 0
    gc.collect()
    assert json.loads(counted.read_text())["num_experts"] == json.loads(loads.read_text())["num_experts"]


def test_stages_of_whole_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks each."""
    path = TINY_MODELS["qwen3-moe"].save(tmp_path / "m")
    tokens, logprobs = run(open_engine(path, **FLOAT32, kv_cache_dtype="fp8"))
    use_drafts(monkeypatch, tokens)
    load_part = test_pipeline.load_model

    def load_whole_experts(files: Any, config: EngineConfig, *rest: Any, **stage: Any) -> Any:
        return load_part(files, replace(config, tp=2, **WHOLE_EXPERTS), *rest, **stage)

    monkeypatch.setattr(test_pipeline, "load_model", load_whole_experts)
    made = test_pipeline.open_stages(
        path, 2, monkeypatch, tp=2, num_speculative_tokens=3, adaptive_drafts=False, kv_cache_dtype="fp8"
    )
    check(made, tokens, logprobs)
