"""Experts' loads counted on a GPU equal those of the plain engine, for steps of any kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import engine.assembly
from engine.assembly import EngineParts, assemble
from engine.expert_balancing.placement import plain_placement
from engine.gpu.ops.rules import GpuStep
from engine.gpu.runner import GpuRunner
from engine.moe.gpu_experts import chooser
from tests.engine.driving import engine_config
from tests.engine.expert_balancing.balancing import balancing_of
from tests.gpu.models import save_tiny_model, use_small_tiles
from tests.gpu.moe.test_experts import DEVICE, load_block
from tests.gpu.test_engine import ON_GPU, PROMPTS, generate, greedy

NUM_TOKENS = 2


def counted(parts: EngineParts, path: Path) -> list[list[int]]:
    balancing_of(parts).loads.write()
    layers: list[list[int]] = json.loads(path.read_text())["layers"]
    return layers


def open_counting(model: Path, path: Path, device: str) -> EngineParts:
    config = engine_config(
        str(model), device=device, dtype="float32", quant_mode="none", num_gpu_blocks=64, max_num_seqs=4,
        max_num_batched_tokens=64, max_model_len=96, expert_load_file=str(path),
    )  # fmt: skip
    return assemble(config)


def test_steps_of_all_kinds_count_their_tokens_and_no_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, without a graph and padded as for one, three decode rows of four, one row."""
    model = save_tiny_model(tmp_path, inner=32, num_experts=4)
    use_small_tiles(monkeypatch, 6)
    found = []
    for device in ("cpu", "cuda" if ON_GPU else "interpreter"):
        path = tmp_path / device
        if device != "cpu" and not ON_GPU:
            monkeypatch.setattr(engine.assembly, "_make_runner", GpuRunner)
        parts = open_counting(model, path, device if ON_GPU else "cpu")
        tokens = [generate(parts.engine, greedy(NUM_TOKENS), PROMPTS[:3])]
        if device == "interpreter":
            parts.runner.prompt_graphs = parts.runner.open_prompt_graphs(captures=False)
        tokens.append(generate(parts.engine, greedy(NUM_TOKENS), PROMPTS[3:]))
        found.append((tokens, counted(parts, path)))
    assert found[0] == found[1]
    num_routed = sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
    assert [sum(layer) for layer in found[0][1]] == [3 * num_routed] * 2  # a token has three experts


def test_a_rank_counts_the_choices_of_all_experts(tmp_path: Path) -> None:
    """The choices of its own experts are the same as without counting."""
    block, logits = load_block(tmp_path, has_shared=False), torch.randn(9, 4, device=DEVICE)
    slots = torch.tensor([*range(5), -1, -1, *range(2)], dtype=torch.int32, device=DEVICE)
    step = GpuStep(slots, slots, None)  # type: ignore[arg-type]  # routing reads only its slots
    for held in (range(4), range(2, 4)):
        block.loads = None
        expected = chooser(block, 0, held)(logits, step)
        block.loads = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        for ours, theirs in zip(chooser(block, 0, held)(logits, step), expected, strict=True):
            assert torch.equal(ours, theirs)
        every = chooser(block, 0, range(4))(logits, None)[1][slots >= 0]
        assert block.loads.tolist() == [int((every == expert).sum()) for expert in plain_placement(4)]
