"""A model as data: embedding, a flat list of blocks, final norm, output projection. Knows nothing of how it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.block import Block, LinearRef, take_linear
from engine.layers.linear import Linear
from engine.layers.rotary import rotary_table
from engine.layers.weights import Partition, WeightSource
from engine.models.config import ModelConfig, RopeConfig


class Embedding:
    """The token embedding. weight: (vocab, hidden)."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        self.name = f"{name}.weight"
        self.weight = weights.take(self.name, (config.vocab_size, config.hidden_size), Partition.VOCAB)


class Head:
    """The final norm and the output projection, which may be the embedding's own tensor."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, norm: str, name: str, embedding: Embedding
    ) -> None:
        self.norm = weights.take(f"{norm}.weight", (config.hidden_size,))
        if config.tie_word_embeddings:
            self.linear = Linear(embedding.weight, names=(embedding.name,))
        else:
            self.linear = take_linear(
                weights, [name], [config.vocab_size], config.hidden_size, bias=False, partition=Partition.VOCAB
            )


Part = Embedding | Block | Head
OnBlock = Callable[[Block], None]
"""Called with each block as soon as it is made, before the weights of the next one are read."""


@dataclass(slots=True)
class Model:
    """A model's tensors and blocks. rotary: (max_position_embeddings, 2, rope_dim), see `rotary_table`.

    local_rotary: table of the layers with a window, if it differs.
    """

    config: ModelConfig
    embedding: Tensor  # (vocab, hidden)
    blocks: list[Block]
    final_norm: Tensor
    head: Linear
    rotary: Tensor
    hidden_dtype: torch.dtype  # of the head's input
    local_rotary: Tensor | None = None
    embedding_scale: Tensor | None = None  # in the embedding's dtype, as transformers rounds it

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up the embedding: (num_tokens,) -> (num_tokens, hidden)."""
        return self.embedded(functional.embedding(token_ids, self.embedding), token_ids)

    def embedded(self, rows: Tensor, token_ids: Tensor, first_id: int = 0) -> Tensor:
        """Turn rows of the embedding into the first residual. first_id: the token id of the embedding's first row."""
        return rows if self.embedding_scale is None else rows * self.embedding_scale

    @property
    def takes_rows_as_they_are(self) -> bool:
        """Whether `embedded` returns its rows unchanged."""
        return self.embedding_scale is None

    def linears(self) -> Iterator[LinearRef]:
        """All linear layers, the output projection last."""
        for block in self.blocks:
            yield from block.linears()
        yield LinearRef(self, "head")


def assemble_model(config: ModelConfig, parts: Iterable[Part], on_block: OnBlock | None = None) -> Model:
    """Build a model from the parts that a family's function yields."""
    embedding = head = None
    blocks: list[Block] = []
    for part in parts:
        if isinstance(part, Embedding):
            embedding = part.weight
        elif isinstance(part, Head):
            head = part
        else:
            if on_block is not None:
                on_block(part)
            blocks.append(part)
    if embedding is None or head is None:
        raise ValueError(f"{config.architecture} yields no embedding or no head")
    on_cpu = embedding.device.type == "cpu"
    dtype, device, num_positions = embedding.dtype, embedding.device, config.max_position_embeddings

    def table_of(rope: RopeConfig) -> Tensor:
        return rotary_table(rope, config.rope_dim, num_positions, torch.float32 if on_cpu else dtype, device)

    rotary, local_rotary = table_of(config.rope), None if config.local_rope is None else table_of(config.local_rope)
    scale = None if config.embedding_scale == 1 else torch.tensor(config.embedding_scale, dtype=dtype, device=device)
    return Model(config, embedding, blocks, head.norm, head.linear, rotary, dtype, local_rotary, scale)
