"""Requests with and without adapters in one engine on a GPU get the tokens of models with merged adapters."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.assembly
import engine.lora.adapters
from common.errors import InvalidRequestError
from common.lora.adapter_ref import AdapterRef
from common.model_files import ModelFiles
from engine.config import GpuConfig, Stage
from engine.engine import Engine
from engine.gpu.runner import GpuRunner
from engine.loader.load import load_model
from engine.lora import gpu_adapters, gpu_layers
from engine.lora.adapters import open_adapters
from engine.lora.gpu_adapters import FollowedGpuAdapters, GpuAdapters
from engine.lora.gpu_slots import SlotStore
from engine.request import SamplingParams
from kernels.gpu.lora.gated_rows import gated_rows
from kernels.gpu.lora.tile_shrink import MAX_ROWS
from kvstore.layout import Shard
from tests.gpu.late_compiles.test_late_compiles import nothing_is_compiled_yet
from tests.gpu.models import save_tiny_model
from tests.gpu.pipeline_parallel import test_pipeline_parallel
from tests.gpu.test_engine import ON_GPU, open_gpu
from tests.harness.adapters import deltas, write_adapter

pytestmark = pytest.mark.wing("engine.lora")
__all__ = ["nothing_is_compiled_yet"]  # a fixture
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + k) % 97 for k in range(length)] for i, length in enumerate((5, 27, 12, 9))]
Asked = Sequence[tuple[list[int], Path | None]]
Answers = dict[tuple[int | Path | None, ...], list[int]]  # by the tokens of a prompt, and an adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of this file only, whose weights change."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[Path]:
    """Adapters of all linear layers; of some, with several ranks; of one layer only."""
    folder = tmp_path_factory.mktemp("adapters")
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(model / "model.safetensors").items() if tensor.dim() == 2
    }  # fmt: skip
    some = ("q_proj", "v_proj", "down_proj", "gate_proj")
    return [
        write_adapter(folder / "all", shapes, seed=1),
        write_adapter(folder / "some", shapes, some, seed=2, use_rslora=True, rank_pattern={"q_proj": 9}, r=3),
        write_adapter(folder / "one", shapes, ("layers.1.self_attn.o_proj",), seed=3, std=0.4),
    ]


def open_engine(model: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool = True, **settings: Any) -> Engine:
    if not ON_GPU:  # the same runner, its kernels interpreted
        monkeypatch.setattr(engine.lora.adapters, "CpuAdapters", GpuAdapters)
    gpu = GpuConfig(use_cuda_graph=graphs)
    made, runner = open_gpu(model, monkeypatch, gpu, enable_lora=True, max_lora_rank=9, **settings)
    assert isinstance(runner, GpuRunner)
    return made


def steps_of_prompt_graphs(made: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Open graphs if none are captured. Returns the number of rows of each step run by graphs with adapters."""
    runner: Any = made._runner
    if not ON_GPU:
        runner.prompt_graphs = runner.open_prompt_graphs(captures=False)
        runner.open_adapted_prompts(captures=False)
    graphs, found = runner._adapted_prompts, []
    take = graphs.run

    def counted(batch: Any, *args: Any) -> Any:
        found.append(len(batch.rows))
        return take(batch, *args)

    monkeypatch.setattr(graphs, "run", counted)
    return found


def run(made: Engine) -> None:
    """Run all requests. Steps are empty while an adapter is read."""
    end = time.monotonic() + 60
    while made.has_work():
        assert time.monotonic() < end, "the engine does not end"
        assert not any(output.error for output in made.step().outputs)


def answers(made: Engine, asked: Asked, params: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [
        made.add_request(prompt, params, adapter=str(AdapterRef.of(folder)) if folder else "")
        for prompt, folder in asked
    ]
    run(made)
    assert made.num_failed_steps == 0
    return [request.output_token_ids for request in requests]


@pytest.fixture(scope="module")
def known() -> Answers:
    """Answers of `merged_answers`, cached for later tests."""
    return {}


def merged_answers(model: Path, asked: Asked, known: Answers, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the answers of engines without adapters, over merged weights."""
    stored = load_file(model / "model.safetensors")
    for folder in {folder for prompt, folder in asked if (*prompt, folder) not in known}:
        merged = dict(stored)
        for name, delta in (deltas(folder) if folder else {}).items():
            merged[name] = stored[name] + delta
        save_file(merged, model / "model.safetensors")
        made, _ = open_gpu(model, monkeypatch, GpuConfig(use_cuda_graph=False))
        for prompt in (prompt for prompt, own in asked if own == folder):
            request = made.add_request(prompt, GREEDY)
            run(made)
            known[*prompt, folder] = request.output_token_ids
    save_file(stored, model / "model.safetensors")
    return [known[*prompt, folder] for prompt, folder in asked]


DRAFTS = {"num_speculative_tokens": 2, "adaptive_drafts": False, "max_num_seqs": 18}


on_gpu_alone = pytest.mark.skipif(not ON_GPU, reason="the others have each of both, which takes seconds here")


WAYS = [
    (True, {}),
    (False, DRAFTS),
    pytest.param(False, {}, marks=on_gpu_alone),
    pytest.param(True, DRAFTS, marks=on_gpu_alone),
]


@pytest.mark.parametrize(("has_graphs", "settings"), WAYS)
def test_a_batch_of_adapters_equals_merged_models(
    has_graphs: bool, settings: dict[str, Any], model: Path, adapters: list[Path], known: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first, second, third = adapters
    asked = [*zip(PROMPTS, (first, None, second, third), strict=True), (PROMPTS[0], second), (PROMPTS[0], None)]
    wanted = merged_answers(model, asked, known, monkeypatch)
    assert len(set(map(tuple, (wanted[0], *wanted[4:])))) == 3, "adapters change the answer"
    made = open_engine(model, monkeypatch, has_graphs, max_num_batched_tokens=24, **settings)
    graphs = steps_of_prompt_graphs(made, monkeypatch) if has_graphs else []
    assert answers(made, asked) == wanted
    assert bool(graphs) == has_graphs
    assert answers(made, asked[3::-1]) == wanted[3::-1]  # from the prefix cache
    assert answers(made, asked[1:2]) == wanted[1:2]  # no step has adapters


def test_gate_and_up_in_one_kernel_with_adapters_and_activation(
    model: Path, adapters: list[Path], known: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wide layers of 16 bits have it in steps of up to 64 rows."""
    first, second, third = adapters
    asked = [*zip(PROMPTS, (first, None, second, third), strict=True), (PROMPTS[0], second), (PROMPTS[0], None)]
    steps: list[int] = []

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        steps.append(x.shape[0])
        return gated_rows(x, *args)

    monkeypatch.setattr(gpu_layers, "gated_rows", counted)
    monkeypatch.setattr(gpu_layers, "takes_gated_rows", lambda num_rows, _: num_rows <= MAX_ROWS)
    made = open_engine(model, monkeypatch, max_num_batched_tokens=24)
    assert answers(made, asked) == merged_answers(model, asked, known, monkeypatch)
    assert steps


def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would change the rows of other adapters."""
    folder = write_adapter(tmp_path / "broken", {"model.layers.0.self_attn.o_proj.weight": (64, 64)}, ("o_proj",))
    stored = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in stored if "lora_B" in name)
    stored[name][3, 0] = torch.inf
    save_file(stored, folder / "adapter_model.safetensors")
    made = open_engine(model, monkeypatch)
    request = made.add_request(PROMPTS[0], GREEDY, adapter=str(AdapterRef.of(folder)))
    errors: list[str] = []
    end = time.monotonic() + 60
    while made.has_work() and time.monotonic() < end:
        errors += [output.error for output in made.step().outputs if output.error]
    assert not request.output_token_ids
    assert "holds weights that are infinite or undefined" in errors[0]
    after = made.add_request(PROMPTS[0], GREEDY)
    run(made)
    assert len(after.output_token_ids) == GREEDY.max_tokens


def test_more_adapters_than_slots_take_turns(
    model: Path, adapters: list[Path], known: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = adapters
    asked = [(prompt, folder) for folder in (first, second, third, None) for prompt in PROMPTS[::3]]
    wanted = merged_answers(model, asked, known, monkeypatch)
    made = open_engine(model, monkeypatch, max_loras=1, lora_modules=f"first={first}", prefix_cache=False)
    store = made._adapters
    assert isinstance(store, SlotStore)
    assert answers(made, asked) == wanted
    assert answers(made, asked[:3]) == wanted[:3]
    figures = made.figures()
    assert figures["mini_infer_lora_adapters"] == [1]
    assert figures["mini_infer_lora_loads"][0] >= 4
    assert len(store._files) == 1


def open_ranks(
    model: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 2, num_stages: int = 1, **settings: Any
) -> tuple[Engine, list[GpuAdapters]]:
    """Open an engine on several ranks, in threads, or stages. Returns it and the adapters of each, its own first."""
    opened: list[GpuAdapters] = []
    run_one = GpuAdapters.runner

    def of_part(part: Any, layers: Any, wanted: Any, count: int) -> GpuAdapters:
        opened.append((FollowedGpuAdapters if opened else GpuAdapters)(part, layers, wanted, count))
        return opened[-1]

    def of_first(loaded: Any, config: Any) -> Any:
        files, config = ModelFiles("tiny", "directory", model), replace(config, tp=num_ranks, pp=num_stages)
        last = Stage(num_stages - 1, num_stages) if num_stages > 1 else None
        return open_adapters(load_model(files, config, loaded.device, Shard(0, num_ranks), stage=last), config)

    def of_rank(part: Any, pool: Any, slots: Any, config: Any, gpu: GpuConfig, length: int, ranks: Any) -> Any:
        is_own = not part.shard.rank and not ranks.passes_on
        if not is_own:
            open_adapters(part, config)
        own = opened[0 if is_own else -1]
        return run_one(own, part, pool, slots, config, ranks, gpu=gpu, max_model_len=length)

    monkeypatch.setattr(engine.lora.adapters, "CpuAdapters", of_part)
    for kind in ("GpuAdapters", "FollowedGpuAdapters"):
        monkeypatch.setattr(gpu_adapters, kind, of_part)
    monkeypatch.setattr(engine.assembly, "adapters_of", of_first)
    monkeypatch.setattr(test_pipeline_parallel, "GpuRunner", of_rank)
    monkeypatch.setattr(GpuAdapters, "runner", lambda _, *held, **sized: engine.assembly._make_runner(*held, *sized))
    gpu = GpuConfig(use_cuda_graph=num_ranks == 1)  # ranks here are threads, but one thread captures
    made = test_pipeline_parallel.open_stages(
        model, num_stages, monkeypatch, gpu, num_ranks, enable_lora=True, **settings
    )
    return made, opened


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output projection is not the embedding."""
    folder = save_tiny_model(tmp_path_factory.mktemp("untied"))
    stored = load_file(folder / "model.safetensors")
    head = torch.randn(stored["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(8))
    save_file({**stored, "lm_head.weight": head}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


VOCABULARY = ("embed_tokens", "lm_head")
NAMED = ",".join((*VOCABULARY, "q_proj", "down_proj"))


@pytest.fixture(scope="module")
def of_vocabulary(tmp_path_factory: pytest.TempPathFactory, untied: Path) -> list[Path]:
    """Adapters of embedding, output projection and a layer; of the output projection; of a layer."""
    folder = tmp_path_factory.mktemp("vocabulary")
    shapes = {n: tuple(t.shape) for n, t in load_file(untied / "model.safetensors").items() if t.dim() == 2}
    return [
        write_adapter(folder / "both", shapes, (*VOCABULARY, "q_proj"), seed=1, rank_pattern={"q_proj": 9}, std=0.2),
        write_adapter(folder / "head", shapes, ("lm_head",), seed=2, std=0.4),
        write_adapter(folder / "down", shapes, ("down_proj",), seed=3, std=0.4),
    ]


@pytest.fixture(scope="module")
def known_of_untied() -> Answers:
    """See `known`."""
    return {}


@pytest.mark.parametrize(("has_graphs", "settings"), WAYS)
def test_embedding_and_output_projection_have_adapters(
    has_graphs: bool, settings: dict[str, Any], untied: Path, of_vocabulary: list[Path], known_of_untied: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    both, head, down = of_vocabulary
    asked = [*zip(PROMPTS, (both, None, head, down), strict=True), (PROMPTS[0], head), (PROMPTS[0], None)]
    wanted = merged_answers(untied, asked, known_of_untied, monkeypatch)
    assert len(set(map(tuple, (wanted[0], *wanted[4:])))) == 3, "adapters change the answer"
    made = open_engine(
        untied, monkeypatch, has_graphs, max_num_batched_tokens=24, lora_target_modules=NAMED, **settings
    )
    if has_graphs:
        steps_of_prompt_graphs(made, monkeypatch)
    assert answers(made, asked) == wanted
    assert answers(made, asked[3::-1]) == wanted[3::-1]


def test_log_probabilities_of_prompts_beside_an_adapter_of_the_head(
    untied: Path, of_vocabulary: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed for all tokens of a chunk, none of which is a row of the adapter."""
    both, head, _ = of_vocabulary
    modules = f"both={both} head={head}"  # read at the start, so that all requests are in the first step
    made = open_engine(untied, monkeypatch, False, lora_target_modules=NAMED, lora_modules=modules)

    def logprobs(*others: Path) -> list[float]:
        for folder in others:
            made.add_request(PROMPTS[2], GREEDY, adapter=str(AdapterRef.of(folder)))
        made.add_request(PROMPTS[1], replace(GREEDY, prompt_logprobs=0))
        found: list[float] = []
        while made.has_work():
            for output in made.step().outputs:
                found += [each.logprob for each in output.prompt_logprobs]
        return found

    alone = logprobs()
    assert len(alone) == len(PROMPTS[1]) - 1
    assert logprobs(head, both) == pytest.approx(alone, rel=1e-5)


@pytest.mark.skipif(ON_GPU, reason="tests/gpu/tensor_parallel has it on two GPUs")
def test_two_ranks_have_parts_of_the_vocabulary(
    untied: Path, of_vocabulary: list[Path], known_of_untied: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, head, down = of_vocabulary
    asked = list(zip(PROMPTS, (both, None, head, down), strict=True))
    wanted = merged_answers(untied, asked, known_of_untied, monkeypatch)
    made, _ = open_ranks(untied, monkeypatch, max_lora_rank=9, max_loras=4, lora_target_modules=NAMED)
    assert answers(made, asked) == wanted


@pytest.mark.skipif(ON_GPU, reason="tests/gpu/tensor_parallel has it on two GPUs")
def test_two_ranks_equal_merged_models(
    model: Path, adapters: list[Path], known: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank reads adapters when plans name them, into slots that it frees itself."""
    first, second, third = adapters
    asked = [*zip(PROMPTS, (first, None, second, third), strict=True), (PROMPTS[0], second), (PROMPTS[0], None)]
    wanted = merged_answers(model, asked, known, monkeypatch)
    made, opened = open_ranks(model, monkeypatch, max_lora_rank=9, max_loras=2)
    assert answers(made, asked) == wanted
    assert answers(made, asked[:1]) == wanted[:1]
    assert [type(each) for each in opened] == [GpuAdapters, FollowedGpuAdapters]
    assert [len(each._loads) for each in opened] == [2, 2]
    assert len({each._num_loads for each in opened}) == 1, "no rank reads an adapter twice for one step"


@pytest.mark.parametrize("max_loras", [2, 4])
def test_two_stages_equal_merged_models(
    max_loras: int, untied: Path, of_vocabulary: list[Path], known_of_untied: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage has the adapters of its layers, the first one the embedding's, the last one the head's."""
    both, head, down = of_vocabulary
    asked = [*zip(PROMPTS, (both, None, head, down), strict=True), (PROMPTS[0], None), (PROMPTS[0], both)]
    wanted = merged_answers(untied, asked, known_of_untied, monkeypatch)
    made, opened = open_ranks(
        untied, monkeypatch, 1, 2, max_lora_rank=9, max_loras=max_loras, lora_target_modules=NAMED
    )
    assert answers(made, asked) == wanted
    assert answers(made, asked[:1]) == wanted[:1]
    last, first = (each._in_memory for each in opened)
    assert [first.embedding is None, last.embedding is None] == [False, True]
    assert [first.layers[-1] is None, last.layers[-1] is None] == [True, False]


def test_slots_that_a_step_may_read_are_kept(
    model: Path, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits while all slots are of requests that run, also when its own is the older one."""
    first, second, _ = adapters
    made = open_engine(model, monkeypatch, max_loras=1)
    running = made.add_request(PROMPTS[0], replace(GREEDY, max_tokens=9), adapter=str(AdapterRef.of(first)))
    while len(running.output_token_ids) < 3:
        made.step()
    waiting = made.add_request(PROMPTS[1], GREEDY, adapter=str(AdapterRef.of(second)))
    while not waiting.output_token_ids:
        before = len(running.output_token_ids)
        made.step()
    assert before == 9
    run(made)
    assert len(waiting.output_token_ids) == GREEDY.max_tokens


def test_the_vocabulary_has_to_be_named(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "table", {"model.embed_tokens.weight": (97, 64)}, ("embed_tokens",))
    made = open_engine(model, monkeypatch)
    with pytest.raises(
        InvalidRequestError, match=r"changes model\.embed_tokens, which --lora-target-modules of workers has to name"
    ):
        made.add_request(PROMPTS[0], GREEDY, adapter=str(AdapterRef.of(folder)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs and 8-bit GEMMs need a GPU")
@pytest.mark.parametrize("quant_mode", ["none", "fp8", "int8-weight"])
def test_graphs_and_quantized_weights(quant_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, as close to the merged model in float32 as an engine with merged weights."""
    (tmp_path / "wide").mkdir()
    model = save_tiny_model(tmp_path / "wide", head_dim=64, hidden=256, inner=512)
    stored = load_file(model / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items() if tensor.dim() == 2}
    folder = write_adapter(tmp_path / "all", shapes, seed=1, std=0.08)
    prompt = [(11 * k) % 97 for k in range(60)]

    def logprobs(adapter: str, mode: str, dtype: str = "bfloat16") -> torch.Tensor:
        """Return log-probabilities of a prompt's tokens, from an eager step."""
        made, _ = open_gpu(
            model, monkeypatch, GpuConfig(), dtype, quant_mode=mode, enable_lora=bool(adapter), max_model_len=96
        )
        made.add_request(prompt, replace(GREEDY, max_tokens=8, prompt_logprobs=0), adapter=adapter)
        found: list[float] = []
        while made.has_work():
            for output in made.step().outputs:
                found += [each.logprob for each in output.prompt_logprobs]
        return torch.tensor(found)

    ours = logprobs(str(AdapterRef.of(folder)), quant_mode)
    plain = logprobs("", "none")
    save_file({n: t + deltas(folder).get(n, torch.zeros(())) for n, t in stored.items()}, model / "model.safetensors")
    wanted, merged = logprobs("", "none", "float32"), logprobs("", quant_mode)
    noise = float((merged - wanted).abs().mean())
    assert float((ours - wanted).abs().mean()) < 1.5 * noise
    assert float((plain - wanted).abs().mean()) > 5 * noise


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles nothing without a GPU")
@pytest.mark.usefixtures("nothing_is_compiled_yet")
@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 2}])
def test_no_request_with_an_adapter_waits_for_a_compiler(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wide").mkdir()
    model = save_tiny_model(tmp_path / "wide", head_dim=64, hidden=256, inner=512)
    shapes = {n: tuple(t.shape) for n, t in load_file(model / "model.safetensors").items() if t.dim() == 2}
    folders = [write_adapter(tmp_path / str(seed), shapes, seed=seed, std=0.08) for seed in (1, 2)]
    made, _ = open_gpu(
        model, monkeypatch, GpuConfig(), "bfloat16",
        **{"num_gpu_blocks": 2000, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 250,
           "enable_lora": True, **settings},
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        for count, length in ((1, 5), (1, 200), (3, 17), (40, 33), (64, 130)):
            own = [(folders[0], None, folders[1])[row % 3] for row in range(count)]
            answers(made, [([(row * 7 + k) % 97 for k in range(length)], own[row]) for row in range(count)])
    late = [record.message for record in caplog.records if record.name == "engine.late_compiles.log"]
    assert not late, "\n".join(late)
