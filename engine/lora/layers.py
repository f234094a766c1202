"""A model's linear layers as adapters name them: which rows of a layer are the outputs of which module.

Adapters use the module names of Hugging Face's model; here q, k and v are one layer, and so are gate and up. Each of
several ranks has a part of every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from common.errors import ConfigError
from engine.fused.stored_rows import StoredRows, stored_rows
from engine.layers.attention import Attention, AttentionBlock
from engine.layers.block import Block, LinearRef
from engine.layers.mlp import Mlp
from engine.layers.weights import Part, Partition, ShapeRecorder
from engine.loader.checkpoint import Shape
from engine.models.config import ModelConfig
from engine.models.families import family_of
from kvstore.layout import WHOLE, Shard

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Module:
    """A module whose outputs are rows of a layer.

    name: as adapters name it, with `num_outputs`. first: the layer's row from which on it has the rows `rows` of the
    module's weight. lies: which outputs that weight consists of; None: all, in order.
    """

    name: str
    num_outputs: int
    first: int
    rows: range
    lies: StoredRows | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, in the order of `Model.linears`. modules: empty if adapters may not change it.

    num_columns: of the modules, of which the layer has `columns`. number: of the decoder layer that it is part of.
    """

    num_rows: int
    num_columns: int
    columns: range
    modules: tuple[Module, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class Layers:
    """Everything that adapters of a model may change.

    embedding: its module's name; empty: adapters may not change it. tokens: the rank's part of the vocabulary.
    left_out: modules that adapters may change only if --lora-target-modules names them. whole: of all stages, if this
    is one of several.
    """

    linears: tuple[Layer, ...]
    embedding: str
    tokens: range
    vocab_size: int
    hidden_size: int
    left_out: frozenset[str] = frozenset()
    whole: Layers | None = None

    @property
    def names(self) -> frozenset[str]:
        """The modules that adapters may have weights for."""
        return frozenset(each.name for layer in self.linears for each in layer.modules) | ({self.embedding} - {""})


def limited(layers: Layers, targets: Collection[str]) -> Layers:
    """Keep the layers and the embedding with one of the modules, named as in PEFT's `target_modules`.

    Raises ConfigError for unknown names.
    """
    last = {name.rpartition(".")[2]: name for name in layers.names}
    if unknown := sorted({*targets} - {*last}):
        raise ConfigError(
            f"--lora-target-modules: adapters cannot change {', '.join(unknown)}, but {', '.join(sorted(last))}"
        )

    def is_wanted(module: str) -> bool:
        return module.rpartition(".")[2] in targets

    linears = [
        each if any(is_wanted(module.name) for module in each.modules) else replace(each, modules=())
        for each in layers.linears
    ]
    kept = replace(layers, linears=tuple(linears), embedding=layers.embedding * is_wanted(layers.embedding))
    return replace(kept, left_out=layers.names - kept.names)


def without_vocabulary(layers: Layers) -> Layers:
    """Leave out the embedding and the output projection."""
    kept = replace(layers, linears=(*layers.linears[:-1], replace(layers.linears[-1], modules=())), embedding="")
    whole = None if layers.whole is None else without_vocabulary(layers.whole)
    return replace(kept, left_out=layers.names - kept.names, whole=whole)


def of_stage(layers: Layers, own: range, num_layers: int) -> Layers:
    """Return the part of a pipeline stage of the decoder layers `own`, of `num_layers`."""
    *of_blocks, head = layers.linears
    linears = [each for each in of_blocks if each.number in own]
    linears.append(head if own.stop == num_layers else replace(head, modules=()))
    return replace(layers, linears=tuple(linears), embedding="" if own.start else layers.embedding, whole=layers)


class _Recorder(ShapeRecorder):
    """Also records how weights are partitioned."""

    def __init__(self) -> None:
        super().__init__()
        self.partitions: dict[str, Partition] = {}

    def take(self, name: str, shape: Shape, partition: Partition = Partition.NONE) -> Tensor:
        self.partitions[name] = partition
        return super().take(name, shape, partition)


def can_change(block: Block) -> bool:
    """Whether adapters may change a block's layers.

    Other blocks reorder their weights, or do not apply them by calls of a layer.
    """
    return isinstance(block.inner, Attention | Mlp)


def layers_of(config: ModelConfig, of_rank: ModelConfig | None = None, shard: Shard = WHOLE) -> Layers:
    """Return what adapters of this config's model may change: some of its blocks, embedding and head, in all stages.

    of_rank: the config of a rank's part of the model.
    """
    family, recorder = family_of(config.architecture), _Recorder()
    whole = family.skeleton(config)[1]
    model = family.build(replace(of_rank or config, num_layers=config.num_layers), recorder)
    stored = stored_rows(whole, family.fused, config)

    def part(name: str) -> Part:
        if shard.size == 1 or recorder.partitions[name] is Partition.NONE:
            return tuple(map(range, whole[name]))
        from engine.tensor_parallel.weights import part_of

        return part_of(whole[name], recorder.shapes[name], recorder.partitions[name], shard)

    linears, number = [], -1
    for block in model.blocks:
        number += isinstance(block.inner, AttentionBlock)
        for ref in block.linears():
            parts = {name: part(name) for name in ref.layer.names}
            linears.append(replace(_layer(ref, parts, whole, stored, can_change(block)), number=number))
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    [name] = [name for name in whole if name.endswith("embed_tokens.weight")]
    rows = part(model.head.names[0])[0]
    head = Layer(len(rows), hidden_size, range(hidden_size), (Module(HEAD, vocab_size, 0, rows),))
    is_plain = config.embedding_scale == 1  # it is undefined whether an adapter's part is scaled, too
    embedding = name.removesuffix(".weight") if is_plain else ""
    return Layers((*linears, head), embedding, part(name)[0], vocab_size, hidden_size)


def _layer(
    ref: LinearRef, parts: Mapping[str, Part], whole: Mapping[str, Shape], stored: Mapping[str, StoredRows],
    can_change: bool,
) -> Layer:  # fmt: skip
    """Describe a linear layer. parts: which rows and columns of each of its weights this rank has."""
    num_rows, num_columns = ref.layer.weight.shape
    if not can_change:
        return Layer(num_rows, num_columns, range(num_columns))
    modules, first = [], 0
    for name, (rows, _) in parts.items():
        lies = stored.get(name)
        module = (name if lies is None else lies.stored).removesuffix(".weight")
        num_outputs = whole[name][0] if lies is None else lies.stored_rows
        modules.append(Module(module, num_outputs, first, rows, lies))
        first += len(rows)
    name, (_, columns) = next(iter(parts.items()))
    return Layer(num_rows, whole[name][1], columns, tuple(modules))
