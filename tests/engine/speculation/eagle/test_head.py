"""A head's drafts against a reference written out here, on hidden states that transformers computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.engine.driving import answers
from tests.engine.speculation.eagle.heads import RandomHead, Reference
from tests.engine.speculation.heads.recording import GREEDY, Recording, check_drafts
from tests.engine.speculation.opening import open_parts
from tests.engine.tiny_models import TINY_MODELS, TinyModel

pytestmark = pytest.mark.slow
NUM_DRAFTS = 4
DEEP = {"num_hidden_layers": 8}  # so that the three layers are different ones
MODELS = {
    "llama": TinyModel("Llama", DEEP),
    "llama-tied": TinyModel("Llama", {**DEEP, "tie_word_embeddings": True}),
    "qwen3": TinyModel("Qwen3", {**DEEP, **TINY_MODELS["qwen3"].changes}),
}
HEADS = {
    "plain": RandomHead(),
    "own-tokens-and-embedding": RandomHead(draft_vocab=0, has_embedding=True),
    "normed-residual": RandomHead({"norm_before_residual": True}),
    "chosen-inputs": RandomHead({"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}),
}
READ = {"chosen-inputs": (1, 4, 7)}  # others: 2, n / 2, n - 3


def saved(tmp_path: Path, model: str, head: RandomHead) -> tuple[transformers.PreTrainedModel, Path, Path]:
    built = MODELS[model].build()
    return built, MODELS[model].save(tmp_path / "model", built), head.save(tmp_path / "head")


@pytest.mark.parametrize(
    ("model", "head", "settings"),
    [
        *(("llama", name, {}) for name in HEADS),
        ("llama-tied", "plain", {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
        ("qwen3", "plain", {"batch_invariant": True, "prefix_cache": False}),
    ],
)
def test_drafts_are_those_of_the_reference(tmp_path: Path, model: str, head: str, settings: dict[str, Any]) -> None:
    built, path, folder = saved(tmp_path, model, HEADS[head])
    parts = open_parts(
        path, speculative=f"eagle:{folder}", adaptive_drafts=False, quant_mode="none",
        num_speculative_tokens=NUM_DRAFTS, **settings,
    )  # fmt: skip
    embedding = built.state_dict()["model.embed_tokens.weight"]
    reference = Reference(HEADS[head].config, HEADS[head].tensors(), embedding)
    # Positions beyond those that the head's config names are rotated on.
    assert HEADS[head].config["max_position_embeddings"] == 64

    def drafts(known: list[int], count: int) -> list[int]:
        return reference.drafts(known, states_of(built, known[:-1], READ.get(head, (2, 4, 5))), count)

    check_drafts(parts, NUM_DRAFTS, drafts)


@torch.no_grad()
def states_of(model: transformers.PreTrainedModel, token_ids: list[int], layers: tuple[int, ...]) -> Tensor:
    found = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in layers], -1)


def test_a_request_may_want_fewer_or_none(tmp_path: Path) -> None:
    """A request without drafts costs nothing. No request gets more drafts than the engine's number."""
    _, path, folder = saved(tmp_path, "llama", RandomHead())
    parts = open_parts(path, speculative=f"eagle:{folder}", adaptive_drafts=False)
    recording = Recording(parts.runner._proposer)
    wanted = (0, 2, 64)
    params = [replace(GREEDY, num_speculative_tokens=most) for most in wanted]
    found = answers(parts.engine, [[5, 6, most] for most in wanted], params)
    most_drafts = [
        max((len(drafts) for known, drafts in recording.proposed if known[2] == most), default=0) for most in wanted
    ]
    assert most_drafts == [0, 2, 4]
    assert all(len(answer) == 40 for answer in found)
