"""Ranks on two GPUs give the tokens of one, and end together."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.lora.adapter_ref import AdapterRef
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.engine import DeviceLostError, Engine
from engine.request import SamplingParams
from tests.engine.driving import engine_config, num_drafts, prompt_logprobs
from tests.engine.expert_balancing.balancing import balancing_of
from tests.engine.quantization.packed_files import FORMATS, SIZES, write
from tests.engine.speculation.drafters import MakeOracle, draft_with, knows
from tests.engine.speculation.eagle.heads import RandomHead
from tests.engine.tiny_models import TinyModel
from tests.gpu.kv.test_kv_groups import GEMMA3, GPT_OSS
from tests.gpu.mla.test_latents import V2
from tests.gpu.models import save_family, save_tiny_model
from tests.gpu.moe.test_packed_experts import save_mxfp4
from tests.gpu.test_engine import generate, greedy
from tests.harness.adapters import write_adapter
from tests.harness.processes import followers_of
from tests.kernels.helpers import relative_error

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS = [[(7 * i + 3 * j * j) % 97 for j in range(length)] for i, length in enumerate((5, 19, 200, 180, 190, 170))]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=3),
    replace(GREEDY, temperature=1.0, seed=4, top_p=0.8, top_k=30, logprobs=2),
    replace(GREEDY, presence_penalty=0.8, bad_words=((5, 6),)),
    replace(GREEDY, prompt_logprobs=1),
    GREEDY,
]


def open_ranks(
    model: Path, tp: int, overlap: bool = True, graphs: bool = True, dtype: str = "float32", **settings: Any
) -> Engine:
    """Open an engine, by default in float32, where sums over ranks hardly differ."""
    settings = {"quant_mode": "none", "max_num_seqs": 8, **settings}
    config = EngineConfig(
        str(model), device="cuda", dtype=dtype, tp=tp, num_gpu_blocks=128,
        max_num_batched_tokens=1024, max_model_len=250, **settings,
    )  # fmt: skip
    parts = assemble(config, gpu=GpuConfig(overlap=overlap, use_cuda_graph=graphs))
    parts.engine.eos_token_ids = frozenset()
    return parts.engine


def answers_of_one_and_more(open_engine: Callable[[bool], Engine]) -> list[list[list[list[int]]]]:
    """Return answers to all prompts, with sums through NCCL, and to short ones. open_engine: is given are_several."""
    found = []
    for are_several in (False, True):
        made = open_engine(are_several)
        found.append([generate(made, PARAMS, PROMPTS), generate(made, greedy(30), PROMPTS[:2])])
        del made
        gc.collect()
    return found


@pytest.mark.parametrize(("overlap", "graphs"), [(True, True), (False, True), (True, False)])
def test_two_ranks_give_the_tokens_of_one(overlap: bool, graphs: bool, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    one, two = answers_of_one_and_more(lambda are_two: open_ranks(model, 1 + are_two, overlap, graphs))
    assert one == two


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_drafts_of_the_first_rank_change_no_token(kind: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    head = RandomHead(
        {"hidden_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, draft_vocab=60, vocab_size=97,
        model_size=64,
    )  # fmt: skip
    drafter = f"draft:{model}" if kind == "draft" else f"eagle:{head.save(tmp_path / 'head')}"
    expected = generate(open_ranks(model, 1), greedy(30), PROMPTS[:2])
    gc.collect()
    made = open_ranks(model, 2, speculative=drafter, num_speculative_tokens=3, adaptive_drafts=False)
    assert generate(made, greedy(30), PROMPTS[:2]) == expected
    drafted, accepted = num_drafts(made)
    assert drafted > 20
    assert accepted == drafted if kind == "draft" else accepted < drafted


def test_adapters_of_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """There are more adapters than slots."""
    model = save_tiny_model(tmp_path)
    stored = load_file(model / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items() if tensor.dim() == 2}
    names = [str(AdapterRef.of(write_adapter(tmp_path / str(seed), shapes, seed=seed))) for seed in range(3)]
    found = []
    for tp in (1, 2):
        made = open_ranks(model, tp, enable_lora=True, max_lora_rank=8, max_loras=2)
        requests = [made.add_request(prompt, GREEDY, adapter=name) for name in ("", *names) for prompt in PROMPTS[:3]]
        while made.has_work():  # steps are empty while an adapter is read
            made.step()
        found.append([request.output_token_ids for request in requests])
        del made, requests
        gc.collect()
    assert found[0] == found[1]


FAMILIES = {"latents": V2, "gemma3": GEMMA3, "gpt-oss": GPT_OSS}


@pytest.mark.parametrize(
    "kind",
    [
        "experts", "whole experts", "whole experts, dispatched", "latents", "latents, whole experts",
        "latents, whole experts, dispatched", "gemma3", "gpt-oss", "gpt-oss, whole experts",
        "gpt-oss, whole experts, dispatched",
    ],
)  # fmt: skip
def test_two_ranks_of_other_blocks_give_the_tokens_of_one(kind: str, tmp_path: Path) -> None:
    changes, has_whole = FAMILIES.get(kind.split(",")[0]), "whole" in kind
    model = save_family(tmp_path, changes) if changes else save_tiny_model(tmp_path, inner=32, num_experts=4)
    exchange = "dispatch" if "dispatched" in kind else "sum"

    def opened(are_two: bool) -> Engine:
        settings: dict[str, Any] = {"expert_parallel": has_whole, "expert_exchange": exchange} if are_two else {}
        return open_ranks(model, 1 + are_two, **settings)

    one, two = answers_of_one_and_more(opened)
    assert one == two


@pytest.mark.parametrize("exchange", ["sum", "dispatch"])
def test_the_first_of_two_ranks_counts_experts(exchange: str, tmp_path: Path) -> None:
    """It counts as one GPU does; if rows are divided, it counts the rows that it routes."""
    model, path = save_tiny_model(tmp_path, inner=32, num_experts=4), tmp_path / "loads"
    found = []
    for tp in (1, 2):
        config = engine_config(
            str(model), device="cuda", dtype="float32", quant_mode="none", tp=tp, num_gpu_blocks=128, max_num_seqs=8,
            max_num_batched_tokens=1024, max_model_len=250, expert_parallel=tp > 1,
            expert_exchange=exchange if tp > 1 else "sum", expert_load_file=str(path),
        )  # fmt: skip
        parts = assemble(config)
        tokens = generate(parts.engine, greedy(10), PROMPTS[:4])
        balancing_of(parts).loads.write()
        found.append((tokens, torch.tensor(json.loads(path.read_text())["layers"])))
        del parts
        gc.collect()
    (tokens, alone), (tokens_of_ranks, first) = found
    assert tokens == tokens_of_ranks
    assert torch.equal(first, alone) if exchange == "sum" else bool((first <= alone).all())
    assert 0.4 * alone.sum() < first.sum()  # each rank has half of a step's rows, padding among them


@pytest.mark.parametrize("exchange", ["sum", "dispatch"])
def test_ranks_that_exchange_experts_give_the_tokens_of_one(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs, with replicas, and with the loads that the ranks count."""
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_CHOICES_A_SLOT", 1)
    monkeypatch.setattr("engine.expert_balancing.rebalancing.MIN_GAIN", 1.0)
    model = save_tiny_model(tmp_path, inner=32, num_experts=4)
    expected = generate(open_ranks(model, 1), greedy(30), PROMPTS[:4])
    config = engine_config(
        str(model), device="cuda", dtype="float32", quant_mode="none", tp=2, num_gpu_blocks=128, max_num_seqs=8,
        max_num_batched_tokens=1024, max_model_len=250, expert_parallel=True, expert_exchange=exchange,
        num_redundant_experts=2, expert_rebalance_interval=3,
    )  # fmt: skip
    parts = assemble(config)
    for _ in range(2):
        assert generate(parts.engine, greedy(30), PROMPTS[:4]) == expected
    rebalancer = balancing_of(parts).rebalancer
    assert rebalancer is not None
    assert rebalancer.num_changes > 1


def errors_of_one_and_two_ranks(
    model: Path, of_two: dict[str, Any] | None = None, **settings: Any
) -> tuple[float, float]:
    """Return relative errors of the prompts' log-probabilities in bfloat16, against float32 weights."""

    def logprobs(*args: Any, **settings: Any) -> Tensor:
        found = prompt_logprobs(open_ranks(model, *args, **settings), PROMPTS)
        gc.collect()
        return found

    exact = logprobs(1)
    one = relative_error(logprobs(1, dtype="bfloat16", **settings), exact)
    two = relative_error(logprobs(2, dtype="bfloat16", **settings, **(of_two or {})), exact)
    print(f"relative errors of one and two ranks {one:.4f}, {two:.4f}")
    return one, two


@pytest.mark.parametrize("mode", ["none", "fp8", "w8a8", "int8-weight", "int4-weight"])
def test_two_ranks_are_as_near_to_float32_as_one(mode: str, tmp_path: Path) -> None:
    """Ranks round and quantize in other places, not more often."""
    model = save_tiny_model(tmp_path, head_dim=64, hidden=256, inner=512)
    one, two = errors_of_one_and_two_ranks(model, quant_mode=mode)
    assert two < 1.25 * one
    if mode == "none":
        assert two < 2e-2


@pytest.mark.parametrize(
    "name",
    ["gptq", "gptq-act-order", "gptq-8bit", "awq", "compressed-int4-asymmetric", "compressed-int8", "fp8-blocks",
     "fp8-tensor"],
)  # fmt: skip
def test_two_ranks_of_a_checkpoint_are_as_near_to_its_weights_as_one(name: str, tmp_path: Path) -> None:
    """With the layers that the checkpoint holds packed."""
    form, tiny = FORMATS[name], TinyModel("Qwen2", {**SIZES, "hidden_size": 256, "intermediate_size": 512})
    write(form, tmp_path / "m", tiny)
    one, two = errors_of_one_and_two_ranks(tmp_path / "m", quant_mode="auto")
    assert two < 1.25 * one


@pytest.mark.parametrize("settings", [{}, {"expert_parallel": True}], ids=str)
@pytest.mark.parametrize("inner", [64, 160])
def test_ranks_of_mxfp4_experts_are_as_near_to_their_weights_as_one(
    inner: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """160 columns: each of two ranks has two and a half groups of columns."""
    torch.manual_seed(0)
    model = save_mxfp4(tmp_path, inner)
    one, two = errors_of_one_and_two_ranks(model, settings, quant_mode="auto")
    assert two < 1.25 * one


def test_ranks_take_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path)
    expected = generate(open_ranks(model, 1), PARAMS[:2], PROMPTS)
    answers = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=False)]
    drafter = MakeOracle(knows(answers), 0.7, 97)
    draft_with(monkeypatch, drafter, on_gpu=True)
    ranks = open_ranks(model, 2, num_speculative_tokens=4, max_num_seqs=16)
    assert generate(ranks, PARAMS[:2], PROMPTS) == expected
    assert num_drafts(ranks)[1] > 4


def lose_a_rank(made: Engine) -> None:
    """Kill a rank and report the error. Never returns: this process's kernels would wait for the rank."""
    request = made.add_request(PROMPTS[0], replace(GREEDY, max_tokens=200))
    while len(request.output_token_ids) < 5:
        made.step()
    (follower,) = followers_of(os.getpid())
    os.kill(follower, signal.SIGKILL)
    time.sleep(0.3)
    try:
        made.step()
    except DeviceLostError as error:
        print(f"lost: {error}", flush=True)
    os._exit(0)


def assert_a_lost_rank_is_told(module: str, opened: str, model: Path) -> None:
    """Run `lose_a_rank` in a separate process. opened: an expression for the engine, with names of the module."""
    code = f"""
import sys
from {module} import *
from {__name__} import lose_a_rank
model = Path(sys.argv[1])
lose_a_rank({opened})
"""
    command = [sys.executable, "-c", code, str(model)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "lost: rank 1 of the model ended" in found.stdout


def test_a_rank_that_dies_ends_the_engine(tmp_path: Path) -> None:
    assert_a_lost_rank_is_told(__name__, "open_ranks(model, 2)", save_tiny_model(tmp_path))
