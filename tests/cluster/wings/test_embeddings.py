"""Embeddings through real processes: the vectors of transformers, wherever a prompt is computed."""

from __future__ import annotations

from pathlib import Path

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
    """Return transformers' vectors (texts, hidden), normalized."""
    model = TINY.build()
    found = []
    for text in TEXTS:
        token_ids = TOKENIZER.encode(text, True, True)
        states = model.model(torch.tensor([token_ids])).last_hidden_state[0]
        found.append({"last": states[-1], "cls": states[0], "mean": states.mean(dim=0)}[pooling])
    return torch.nn.functional.normalize(torch.stack(found), dim=1)


def embed(cluster: Cluster, **fields: str) -> torch.Tensor:
    with cluster.client() as client:
        answer = client.embeddings.create(model="mini-infer", input=TEXTS, extra_body=fields)
    return torch.tensor([item.embedding for item in answer.data])


def test_vectors_equal_those_of_transformers(tmp_path: Path) -> None:
    """Ranks compute long prompts, and stages, which decode, short ones."""
    model = save_with_tokenizer(TINY, tmp_path)
    with running_cluster(
        engine_args=(f"--model={model}", "--num-gpu-blocks=128", "--num-threads=1", "--quant-mode=none",
                     "--dtype=float32", "--max-num-batched-tokens=48"),
        role_args={"prefill": ["--tp=2"], "decode": ["--pp=2"]},
        router_args=("--pooling=mean",),
    ) as cluster:  # fmt: skip
        for fields, pooling in (({}, "mean"), ({"pooling": "last"}, "last")):
            for _ in range(2):  # the second time with a cache
                torch.testing.assert_close(embed(cluster, **fields), expected(pooling), rtol=1e-4, atol=1e-5)
        cluster.wait_quiet()
