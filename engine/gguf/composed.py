"""Weights that a GGUF file stores as several tensors, or transposed.

    kv_b of latent attention    attn_k_b (heads, rank, nope) and attn_v_b (heads, v, rank), in files of 2025 and later
    gate_up of gpt-oss          ffn_gate_exps and ffn_up_exps (experts, inner, hidden), whose rows alternate
    their biases                ffn_gate_exps and ffn_up_exps (experts, inner)
    down of gpt-oss             ffn_down_exps (experts, hidden, inner)

Each is composed item by item, per head or expert, so that a part of the weight reads only its part of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.gguf.header import GgufTensor
from engine.layers.weights import Part
from engine.loader.checkpoint import Shape

ReadRows = Callable[[str, range], Tensor]
"""(tensor, range of its rows, with all leading dimensions flattened) -> float32 (rows, last dimension)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a weight is composed. stored: names within a layer, whose first dimension is that of items.

    shape: the weight's shape from theirs; None if they do not fit together. make: from one item's tensors (rows, last
    dimension) to rows of the weight.
    """

    weight: str
    stored: tuple[str, ...]
    shape: Callable[..., Shape | None]
    make: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Composed:
    """A weight of `shape` composed of the tensors `stored`, whose items have `rows` rows each."""

    stored: tuple[str, ...]
    rows: tuple[int, ...]
    num_items: int
    shape: Shape
    make: Callable[..., Tensor]

    def read(self, read_rows: ReadRows, part: Part, dtype: torch.dtype) -> Tensor:
        """Read a part of the weight."""
        size = self.shape[0] // self.num_items
        items = range(part[0].start // size, -(-part[0].stop // size))
        made = [self.make(*self._of_item(read_rows, item)).to(dtype) for item in items]
        weight = torch.stack(made).view(-1, *self.shape[1:])
        first = part[0].start - items.start * size
        inside = (range(first, first + len(part[0])), *part[1:])
        return weight[tuple(slice(indices.start, indices.stop) for indices in inside)]

    def _of_item(self, read_rows: ReadRows, item: int) -> list[Tensor]:
        return [
            read_rows(name, range(item * rows, (item + 1) * rows))
            for name, rows in zip(self.stored, self.rows, strict=True)
        ]


def composed_weights(tensors: Mapping[str, GgufTensor], architecture: str) -> dict[str, Composed]:
    """Return composed weights by Hugging Face names, for tensors that are stored with all others that they need."""
    found = {}
    for recipe in _RECIPES.get(architecture, ()):
        first = re.compile(rf"(blk\.(\d+)\.){re.escape(recipe.stored[0])}")
        for match in filter(None, map(first.fullmatch, tensors)):
            names = tuple(match[1] + name for name in recipe.stored)
            shapes = [tensors[name].shape for name in names if name in tensors]
            shape = recipe.shape(*shapes) if len(shapes) == len(names) else None
            if shape is not None:
                rows = tuple(1 if len(stored) == 2 else stored[1] for stored in shapes)
                composed = Composed(names, rows, shapes[0][0], shape, recipe.make)
                found[f"model.layers.{match[2]}.{recipe.weight}"] = composed
    return found


def _kv_b_shape(k: Shape, v: Shape) -> Shape | None:
    if len(k) != 3 or len(v) != 3 or k[:2] != (v[0], v[2]):
        return None
    return k[0] * (k[2] + v[1]), k[1]


def _in_turns_shape(gate: Shape, up: Shape) -> Shape | None:
    if gate != up or len(gate) not in (2, 3):
        return None
    return gate[0], *gate[2:], 2 * gate[1]


def _transposed_shape(down: Shape) -> Shape | None:
    return (down[0], down[2], down[1]) if len(down) == 3 else None


_KV_B = Recipe(
    "self_attn.kv_b_proj.weight",
    ("attn_k_b.weight", "attn_v_b.weight"),
    _kv_b_shape,
    lambda k, v: torch.cat([k.t(), v]),
)
_GPT_OSS = (
    Recipe(
        "mlp.experts.gate_up_proj",
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        _in_turns_shape,
        lambda gate, up: torch.stack([gate, up], dim=1).flatten(0, 1).t(),
    ),
    Recipe(
        "mlp.experts.gate_up_proj_bias",
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        _in_turns_shape,
        lambda gate, up: torch.stack([gate, up], dim=-1).flatten(),
    ),
    Recipe("mlp.experts.down_proj", ("ffn_down_exps.weight",), _transposed_shape, lambda down: down.t()),
)
_RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "DeepseekV2ForCausalLM": (_KV_B,),
    "DeepseekV3ForCausalLM": (_KV_B,),
    "GptOssForCausalLM": _GPT_OSS,
}
