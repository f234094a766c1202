"""An EAGLE-3 head on a GPU, or through Triton's interpreter: no token changes, drafts are those of the CPU's head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine.speculation.proposer
from common.errors import ConfigError
from engine.assembly import assemble
from engine.config import EngineConfig, GpuConfig
from engine.loader.load import LoadedModel
from engine.plan import StepResult
from engine.request import SamplingParams
from engine.runner import Proposer
from engine.speculation.draft_length import DraftLengths
from engine.speculation.drafts import Speculation
from engine.speculation.on_gpu.open_head import HeadOnGpu, load_eagle_head, load_module
from engine.speculation.overlap import Overlap
from tests.engine.driving import engine_config, num_drafts
from tests.engine.speculation.eagle.heads import RandomHead
from tests.gpu.kv.test_kv_groups import GPT_OSS
from tests.gpu.mla.test_latents import V2
from tests.gpu.models import save_family, save_tiny_model, use_small_tiles
from tests.gpu.speculation.test_drafts import MAX_TOKENS, run
from tests.gpu.speculation.test_overlapped_drafts import Changing
from tests.gpu.test_engine import ON_GPU, PROMPTS, assert_same_logprobs, open_gpu, reference

pytestmark = pytest.mark.wing("engine.speculation")
NUM_DRAFTS = 3
OF_MODEL: dict[str, Any] = {"vocab_size": 97, "model_size": 64}
LAYERS = {"hidden_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 1], "max_position_embeddings": 256}
HEADS = {
    "own-tokens": RandomHead(LAYERS, draft_vocab=60, **OF_MODEL),
    "all-tokens": RandomHead({**LAYERS, "norm_before_residual": True}, draft_vocab=0, **OF_MODEL),
}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return HEADS["own-tokens"].save(tmp_path / "head")


def drafted_by(
    model: Path, head: Path | None, monkeypatch: pytest.MonkeyPatch, overlap: Overlap | None = None,
    open_engine: Callable[..., Any] = open_gpu, **settings: Any,
) -> Any:  # fmt: skip
    """Open an engine with drafts of `head`, or of the model's own module. Returns what `open_engine` does."""

    def drafting(config: EngineConfig, loaded: LoadedModel, _: GpuConfig) -> HeadOnGpu:
        return load_module(config, loaded) if head is None else load_eagle_head(str(head), config, loaded)

    def speculation(
        config: EngineConfig, runner: Any, _: LoadedModel, on_gpu: HeadOnGpu, num_blocks: int
    ) -> Speculation:
        lengths = DraftLengths(is_adaptive=False)
        runner.propose_with(on_gpu.open(num_blocks, NUM_DRAFTS, lengths, overlap))
        return Speculation(lengths, config.max_num_seqs, overlap)

    monkeypatch.setattr(engine.speculation.proposer, "proposer_on_gpu", drafting)
    monkeypatch.setattr(engine.speculation.proposer, "open_speculation", speculation)
    settings = {"num_speculative_tokens": NUM_DRAFTS, "max_num_seqs": MAX_TOKENS, **settings}
    return open_engine(model, monkeypatch, GpuConfig(), **settings)


def recorded(proposer: Proposer) -> dict[tuple[int, ...], list[int]]:
    """Return a dict that is filled with later drafts, by the tokens that they follow."""
    proposed: dict[tuple[int, ...], list[int]] = {}
    propose = proposer.propose

    def noted(found: StepResult, sampled: Any) -> None:
        propose(found, sampled)
        requests = {row: request for _, row, request, _, _ in sampled}
        for row, drafts in found.drafts.items():
            proposed[tuple(requests[row].token_ids)] = list(drafts.token_ids)

    proposer.propose = noted  # type: ignore[method-assign]
    return proposed


SETTINGS = [{}, {"block_size": 4, "num_gpu_blocks": 22, "max_model_len": 88, "max_num_batched_tokens": 16}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_drafts_change_no_token(
    settings: dict[str, Any], model: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, told = run(reference(model))
    made, runner = drafted_by(model, head, monkeypatch, **settings)
    runner.prompt_graphs = runner.open_prompt_graphs(captures=False)
    for _ in range(1 if settings else 2):  # the second time from the prefix cache
        made.num_steps = 0
        requests, found = run(made)
        for request, other in zip(requests, plain, strict=True):
            assert request.output_token_ids == other.output_token_ids
    if not settings:
        for request, other in zip(requests, plain, strict=True):
            assert_same_logprobs(found[request.request_id], told[other.request_id])
    assert num_drafts(made)[0] > 8


@pytest.mark.parametrize(
    ("temperature", "kind", "changes"),
    [
        (0.9, "own-tokens", {}), (0.0, "all-tokens", GPT_OSS),
        (0.0, "all-tokens", {**V2, "hidden_size": 64}),
    ],
    ids=["sampled", "windows", "latents"],
)  # fmt: skip
def test_drafts_are_those_of_the_head_on_a_cpu(
    temperature: float, kind: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across blocks: they hold 4 tokens here, so that drafts go beyond the blocks that a request has."""
    (tmp_path / "model").mkdir()
    model = save_family(tmp_path / "model", changes) if changes else save_tiny_model(tmp_path / "model")
    use_small_tiles(monkeypatch, 4)
    head = HEADS[kind].save(tmp_path / "head")
    params = [SamplingParams(max_tokens=7, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(3)]
    on_cpu = assemble(
        EngineConfig(
            str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64, adaptive_drafts=False,
            speculative=f"eagle:{head}", num_speculative_tokens=NUM_DRAFTS,
        )  # type: ignore[call-arg]
    )  # fmt: skip
    on_cpu.engine.eos_token_ids = frozenset()
    made, runner = drafted_by(model, head, monkeypatch, block_size=4, num_gpu_blocks=64)
    proposed = []
    for each, own in ((on_cpu.engine, on_cpu.runner), (made, runner)):
        proposed.append(recorded(own._proposer))
        for prompt, own_params in zip(PROMPTS, params, strict=False):
            each.add_request(prompt, own_params)
        while each.has_work():
            each.step()
    expected, found = proposed
    common = expected.keys() & found.keys()
    assert len(common) > 8
    equal = sum(expected[known] == found[known] for known in common)
    assert equal >= len(common) - 1  # near ties


def test_layers_are_seen_in_steps_of_any_kind(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, next to decode rows, has the K and V of a prompt in one piece."""
    pools = []
    for size in (64, 16):
        made, runner = drafted_by(
            model, head, monkeypatch, max_num_batched_tokens=size, prefix_cache=False, block_size=16
        )
        made.add_request(PROMPTS[2], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        while made.has_work():
            made.step()
        observer: Any = runner._forward._forwards.observer
        pools.append(observer._pool.clone())
    whole, chunks = ([pool[block, 0, :, :, :16] for block in range(len(pool)) if pool[block].any()] for pool in pools)
    differs = [
        position
        for position in range(len(PROMPTS[2]))
        if not (flat(whole)[:, :, position] - flat(chunks)[:, :, position]).abs().max() < 1e-4
    ]
    assert set(differs) <= {15, 31}  # where a chunk ends its next token is not at hand


def flat(blocks: list[Any]) -> Any:
    import torch

    return torch.cat(blocks, dim=2)


def test_nothing_is_drafted_while_steps_overlap(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run(reference(model))
    made, _ = drafted_by(model, head, monkeypatch, Changing(DraftLengths(is_adaptive=False)))
    requests, _ = run(made)
    assert [request.output_token_ids for request in requests] == [request.output_token_ids for request in plain]
    assert num_drafts(made)[0] > 0


def test_what_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    folder = HEADS["own-tokens"].save(tmp_path / "head")
    loaded = assemble_loaded(model)
    config = EngineConfig(str(model))
    with pytest.raises(ConfigError, match="leave out --pp"):
        load_eagle_head(str(folder), replace(config, pp=2), loaded)
    divided = engine_config(str(model), tp=2, expert_parallel=True, expert_exchange="dispatch")
    with pytest.raises(ConfigError, match="--expert-exchange dispatch"):
        load_eagle_head(str(folder), divided, loaded)
    with pytest.raises(ConfigError, match="a layer that sees all tokens"):
        load_eagle_head(str(folder), config, replace(loaded, config=replace(loaded.config, sliding_window=8)))
    odd = RandomHead({**LAYERS, "head_dim": 24}, draft_vocab=60, **OF_MODEL).save(tmp_path / "odd")
    with pytest.raises(ConfigError, match="head_dim must be a power of two"):
        load_eagle_head(str(odd), config, loaded)


def assemble_loaded(model: Path) -> LoadedModel:
    from common.model_files import resolve_model
    from engine.loader.load import load_model

    return load_model(
        resolve_model(str(model)), EngineConfig(str(model), device="cuda" if ON_GPU else "cpu", quant_mode="none")
    )
