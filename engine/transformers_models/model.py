"""A model of transformers as the engine runs it: hidden states of a step's tokens, and logits of some of them.

A step's tokens are one row of input ids, whatever sequences they belong to; positions tell where each stands, and
attention, which alone lets tokens see each other, is ours. Logits are computed by the family's own code, too: it may
scale or cap them. That code runs over a stand-in for the decoder, which gives the hidden states that we have.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.layers.block import Attend, Step
from engine.layers.linear import Linear
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.transformers_models.block import TransformersAttention
from engine.transformers_models.seam import Call, Layer, connect


class Decoded(dict[str, Any]):
    """A decoder's output: hidden states, as `[0]` and by name, and nothing under any other name."""

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state" if key == 0 else key)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class StandIn(nn.Module):
    """Takes the decoder's place under a head: the embeddings that it is given are the hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **options: Any) -> Decoded:
        return Decoded(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> StandIn:
        """What heads ask for that know a decoder in the decoder (OPT)."""
        return self


class CausalLm:
    """hf: a model built with `NAME` as its attention. layers: see `find_layers`."""

    def __init__(self, hf: Any, layers: Sequence[Layer]) -> None:
        self.hf = hf
        self.blocks = [TransformersAttention(index, layer) for index, layer in enumerate(layers)]
        self._attend: Attend | None = None
        self._head = copy.copy(hf)
        self._head.__dict__["_modules"] = {**hf._modules, hf.base_model_prefix: StandIn()}
        for block, layer in zip(self.blocks, layers, strict=True):
            connect(hf.get_submodule(layer.name), partial(self._attended, block))

    def hidden(self, step: Step) -> Tensor:
        """(num_tokens, hidden), after the final norm."""
        self._attend = step.attend
        found = self.hf.base_model(
            input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False, return_dict=True
        )
        self._attend = None
        hidden: Tensor = found[0][0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, vocab)."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits

    def _attended(self, block: TransformersAttention, call: Call) -> Tensor:
        assert self._attend is not None, "a layer attends outside of a step"
        return block.attend(call, self._attend)


@dataclass(slots=True, kw_only=True)
class TransformersModel(Model):
    """Blocks are those of attention alone. What runs is `code`."""

    code: CausalLm


def model_of(config: ModelConfig, code: CausalLm) -> TransformersModel:
    embedding: Tensor = code.hf.get_input_embeddings().weight
    head = Linear(embedding, gemm=lambda _, hidden: code.logits(hidden))
    rotary = torch.zeros(1, 2, 1).expand(config.max_position_embeddings, -1, -1)  # read by nobody
    norm = embedding.new_empty(0)
    return TransformersModel(config, embedding, list(code.blocks), norm, head, rotary, embedding.dtype, code=code)
