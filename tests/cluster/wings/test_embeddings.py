"""Embeddings through real processes: the vectors of transformers, wherever a prompt is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.model_files import resolve_model
from common.text.load import load_tokenizer
from tests.engine.tiny_models import SHAPE, TinyModel
from tests.harness.cluster import Cluster, running_cluster, save_with_tokenizer

TEXTS = ["Hello", "x", "The quick brown fox jumps over the lazy dog. " * 4, "The quick brown fox " * 6]
TOKENIZER = load_tokenizer(resolve_model("dry-run"))
TINY = TinyModel("Llama", {**SHAPE, "vocab_size": TOKENIZER.vocab_size, "num_hidden_layers": 4})


@torch.inference_mode()
def expected(pooling: str) -> torch.Tensor:
    """(texts, hidden), normalized."""
    model = TINY.build()
    found = []
    for text in TEXTS:
        token_ids = TOKENIZER.encode(text, True, True)
        states = model.model(torch.tensor([token_ids])).last_hidden_state[0]
        found.append(states[-1] if pooling == "last" else states.mean(dim=0))
    return torch.nn.functional.normalize(torch.stack(found), dim=1)


def embed(cluster: Cluster, **fields: str) -> torch.Tensor:
    with cluster.client() as client:
        answer = client.embeddings.create(model="mini-infer", input=TEXTS, extra_body=fields)
    return torch.tensor([item.embedding for item in answer.data])


@pytest.mark.parametrize(
    ("num_prefill", "prefill", "decode"),
    [(0, "", ""), (1, "--tp=2", "--pp=2")],
    ids=["aggregated", "prefill and decode"],
)
def test_vectors_equal_those_of_transformers(num_prefill: int, prefill: str, decode: str, tmp_path: Path) -> None:
    """Ranks compute long prompts, and stages, which decode, short ones."""
    model = save_with_tokenizer(TINY, tmp_path)
    with running_cluster(
        num_prefill=num_prefill,
        engine_args=(f"--model={model}", "--num-gpu-blocks=128", "--num-threads=1", "--quant-mode=none",
                     "--dtype=float32", "--max-num-batched-tokens=48"),
        role_args={"prefill": prefill.split(), "decode": decode.split()},
        router_args=("--pooling=mean",),
    ) as cluster:  # fmt: skip
        for fields, pooling in (({}, "mean"), ({"pooling": "last"}, "last")):
            for _ in range(2):  # the second time with a cache
                torch.testing.assert_close(embed(cluster, **fields), expected(pooling), rtol=1e-4, atol=1e-5)
        cluster.wait_quiet()
