"""The linear layers of a model as adapters name them: which rows of which layer are the outputs of which module.

An adapter names modules as Hugging Face's model has them; here q, k and v are one layer, as are gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.attention import Attention
from engine.layers.block import Block, LinearRef
from engine.layers.mlp import Mlp
from engine.loader.fused import StoredRows, stored_rows
from engine.models.config import ModelConfig
from engine.models.families import family_of

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Module:
    """A module whose outputs are rows of a layer.

    name: of the module that an adapter names. first, num_rows: its part of the layer's outputs. lies: which of the
    named module's outputs these are; None: all, as they are.
    """

    name: str
    first: int
    num_rows: int
    lies: StoredRows | None = None

    @property
    def num_outputs(self) -> int:
        """Outputs of the module that an adapter names."""
        return self.num_rows if self.lies is None else self.lies.stored_rows


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, in the order of `Model.linears`. modules: none, if no adapter may change it."""

    num_columns: int
    num_rows: int
    modules: tuple[Module, ...] = ()


@dataclass(frozen=True, slots=True)
class Layers:
    """All that adapters of a model may change. embedding: the module's name; empty: they may not change it."""

    linears: tuple[Layer, ...]
    embedding: str
    vocab_size: int
    hidden_size: int

    @property
    def names(self) -> frozenset[str]:
        """Modules that adapters may have weights for."""
        return frozenset(module.name for layer in self.linears for module in layer.modules) | (
            {self.embedding} - {""}
        )


def can_change(block: Block) -> bool:
    """Whether adapters may change a block's layers.

    Others hold weights in an order of their own, or apply them otherwise than by calls of a layer.
    """
    return isinstance(block.inner, Attention | Mlp)


def layers_of(config: ModelConfig) -> Layers:
    """What adapters of a model of this config may change: some of its blocks, embedding and head."""
    family = family_of(config.architecture)
    skeleton, shapes = family.skeleton(config)
    rows = stored_rows(shapes, family.fused, config)

    def layer_of(ref: LinearRef, is_plain: bool) -> Layer:
        weight, names = ref.layer.weight, ref.layer.names
        num_rows, num_columns = weight.shape
        if not is_plain:
            return Layer(num_columns, num_rows)
        modules, first = [], 0
        for name in names:
            lies = rows.get(name)
            size, module = shapes[name][0], (name if lies is None else lies.stored).removesuffix(".weight")
            modules.append(Module(module, first, size, lies))
            first += size
        return Layer(num_columns, num_rows, tuple(modules))

    linears = [layer_of(ref, can_change(block)) for block in skeleton.blocks for ref in block.linears()]
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    head = Layer(hidden_size, vocab_size, (Module(HEAD, 0, vocab_size),))
    name = next(name for name in shapes if name.endswith("embed_tokens.weight")).removesuffix(".weight")
    is_plain = config.embedding_scale == 1  # else it is not said whether an adapter's part is scaled, too
    return Layers((*linears, head), name if is_plain else "", vocab_size, hidden_size)
