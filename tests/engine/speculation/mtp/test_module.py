"""A module's drafts against a reference of transformers' layers, and how many of them are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from tests.engine.driving import answers, num_drafts
from tests.engine.quantization.packed_files import FORMATS, write
from tests.engine.speculation.heads.recording import GREEDY, check_drafts
from tests.engine.speculation.mtp.modules import ModelWithModule, Reference
from tests.engine.speculation.opening import open_parts
from tests.engine.tiny_models import TINY_MODELS, VOCAB_SIZE, edit_config

pytestmark = [pytest.mark.slow, pytest.mark.wing("engine.mla")]
NUM_DRAFTS = 3
EXACT: dict[str, Any] = {
    "speculative": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive_drafts": False, "quant_mode": "none"
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (ModelWithModule(), {}),
        (ModelWithModule(own=True), {"mla": "naive"}),
        (ModelWithModule({"q_lora_rank": None, "first_k_dense_replace": 9}, copies=False), {"mla": "latent"}),
        (ModelWithModule(), {"batch_invariant": True, "max_num_batched_tokens": 8, "max_num_seqs": 4}),
        (ModelWithModule(is_mimo=True), {}),
    ],
    ids=["DeepSeek", "own embedding and head", "dense, without copies", "chunks", "MiMo"],
)
def test_drafts_are_those_of_the_reference(tmp_path: Path, kind: ModelWithModule, settings: dict[str, Any]) -> None:
    built = kind.tiny.build()
    parts = open_parts(kind.save(tmp_path / "model", built), **EXACT, **settings)
    check_drafts(parts, NUM_DRAFTS, Reference(built, kind.tensors(built)).drafts)


def test_a_module_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Quantized as DeepSeek publishes it; the module's own weights are plain."""
    kind = ModelWithModule()
    built = write(FORMATS["fp8-blocks"], tmp_path / "model", kind.tiny)
    tensors = kind.tensors(built)
    parts = open_parts(kind.divide(tmp_path / "model", tensors), **EXACT)
    check_drafts(parts, NUM_DRAFTS, Reference(built, tensors).drafts)


def save_chain(path: Path, is_mimo: bool) -> Path:
    """Save a model whose next token is the last one plus 1, and a module that predicts the same from its token."""
    kind = ModelWithModule(is_mimo=is_mimo)
    model = kind.tiny.build()
    size = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.zero_()  # layers add nothing
        model.model.norm.weight.fill_(1)
        embedding = model.model.embed_tokens.weight.normal_(0, 1)
        model.lm_head.weight.copy_(embedding.roll(1, 0))
    tensors = {name: torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    model.save_pretrained(path)
    return kind.divide(path, {**tensors, "eh_proj": torch.eye(size, 2 * size)})


@pytest.mark.usefixtures("forked_followers")
@pytest.mark.parametrize(
    ("is_mimo", "settings"),
    [(False, {}), (False, {"dtype": "bfloat16", "quant_mode": "auto"}), (False, {"tp": 2}), (True, {})],
    ids=str,
)
def test_a_module_that_knows_the_language_is_always_right(
    tmp_path: Path, is_mimo: bool, settings: dict[str, Any]
) -> None:
    parts = open_parts(save_chain(tmp_path / "model", is_mimo), **{**EXACT, **settings})
    [found] = answers(parts.engine, [[5, 6, 7]], replace(GREEDY, max_tokens=80))
    assert found == [token % VOCAB_SIZE for token in range(8, 88)]
    drafted, accepted = num_drafts(parts.engine)
    assert accepted == drafted > 55
    assert parts.engine.num_steps < 80 / NUM_DRAFTS


def test_random_weights_draft(tmp_path: Path) -> None:
    """Benchmarks use random weights if a model's files are missing."""
    path = ModelWithModule().save(tmp_path / "model")
    (path / "model.safetensors").unlink()
    parts = open_parts(path, load_format="dummy", **EXACT)
    answers(parts.engine, [[5, 6, 7]], GREEDY)
    assert num_drafts(parts.engine)[0] > 10


def test_models_without_a_module_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MiMoForCausalLM, not of LlamaForCausalLM"):
        open_parts(Path("dry-run"), **EXACT)
    path = TINY_MODELS["deepseek-v3"].save(tmp_path / "model")
    for count, told in ((0, "model has no module"), (1, r"missing: model\.layers\.3\.")):
        edit_config(path, num_nextn_predict_layers=count)
        with pytest.raises(ConfigError, match=told):
            open_parts(path, **EXACT)
