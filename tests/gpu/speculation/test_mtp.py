"""A module of the model on a GPU, or through Triton's interpreter: no token changes, drafts are those on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import assemble
from engine.config import EngineConfig
from engine.request import SamplingParams
from tests.engine.driving import random_prompt
from tests.engine.speculation.mtp.modules import ModelWithModule
from tests.gpu.mla.test_latents import V3
from tests.gpu.models import save_family, use_small_tiles
from tests.gpu.speculation.test_eagle import NUM_DRAFTS, drafted_by, recorded
from tests.gpu.test_engine import generate

pytestmark = [pytest.mark.wing("engine.speculation"), pytest.mark.wing("engine.mla")]
PROMPTS = [random_prompt(length, 97, length) for length in (5, 21, 80)]
SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_batched_tokens": 128, "block_size": 4, "num_gpu_blocks": 96, "max_num_seqs": 16
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


MIMO: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "tie_word_embeddings": False}


@pytest.fixture(scope="module", params=["deepseek", "mimo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, of which DeepSeek's second one has experts, and a module."""
    kind = ModelWithModule(is_mimo=request.param == "mimo")
    changes = MIMO if kind.is_mimo else V3
    path = save_family(tmp_path_factory.mktemp("model"), {**changes, "num_hidden_layers": 3})
    generator, size = torch.Generator().manual_seed(2), json.loads((path / "config.json").read_text())["hidden_size"]
    own = {name: 1 + 0.1 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    return kind.divide(path, own)


def test_drafts_are_those_of_the_module_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tokens, also of prompts from the prefix cache. One prompt is longer than those that are never narrowed."""
    use_small_tiles(monkeypatch, 4)
    on_cpu = assemble(
        EngineConfig(
            str(model), device="cpu", dtype="float32", quant_mode="none", num_gpu_blocks=64, adaptive_drafts=False,
            speculative="mtp", num_speculative_tokens=NUM_DRAFTS,
        )  # type: ignore[call-arg]
    )  # fmt: skip
    on_cpu.engine.eos_token_ids = frozenset()
    made, runner = drafted_by(model, None, monkeypatch, **SETTINGS)
    expected, found = recorded(on_cpu.runner._proposer), recorded(runner._proposer)
    answers = generate(on_cpu.engine, [PARAMS] * 3, PROMPTS)
    assert generate(made, [PARAMS] * 3, PROMPTS) == answers
    common = expected.keys() & found.keys()
    assert len(common) > 10
    assert sum(expected[known] == found[known] for known in common) >= len(common) - 1  # near ties
    runner.prompt_graphs = runner.open_prompt_graphs(captures=False)
    assert generate(made, [PARAMS], PROMPTS[1:2]) == answers[1:2]
