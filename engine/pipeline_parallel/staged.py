"""One pipeline stage's part of a model: its layers, and the weights that they need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from common.errors import ConfigError
from engine.config import Stage
from engine.layers.attention import AttentionBlock
from engine.layers.block import Block
from engine.loader.checkpoint import Shape
from engine.loader.partial_weights import layer_of
from engine.models.config import PLAIN_BITS, ModelConfig
from engine.models.families import family_of
from kvstore.layout import Shard


def divide_layers(config: ModelConfig, count: int) -> list[range]:
    """Return the layers of each of `count` stages, such that the largest stage has as few weights as possible.

    The head counts, since every step that samples reads it; the embedding, of which a step reads only rows, does not.
    Raises ConfigError for more stages than layers.
    """
    if count > config.num_layers:
        raise ConfigError(f"--pp {count}: the model has {config.num_layers} layers: choose at most so many stages")
    _, shapes = family_of(config.architecture).skeleton(config)
    sizes = [0] * config.num_layers
    for name, shape in shapes.items():
        if (layer := layer_of(name)) is not None:
            sizes[layer] += math.prod(shape)
    return _divide(sizes, config.vocab_size * config.hidden_size * PLAIN_BITS // config.linear_bits, count)


def _divide(sizes: Sequence[int], head: int, count: int) -> list[range]:
    total = [0, *accumulate(sizes)]
    # least[n]: the largest stage's size if layers [0, n) are divided among the stages so far; starts: how.
    least: list[float] = [0.0] + [math.inf] * len(sizes)
    starts: list[list[int]] = []
    for stage in range(count):
        extra = head if stage == count - 1 else 0
        costs = [
            [(max(least[first], total[stop] - total[first] + extra), first) for first in range(stop)]
            for stop in range(len(sizes) + 1)
        ]
        best = [min(options, default=(math.inf, 0)) for options in costs]
        least, start = [cost for cost, _ in best], [first for _, first in best]
        starts.append(start)
    found: list[range] = []
    stop = len(sizes)
    for start in reversed(starts):
        found.append(range(start[stop], stop))
        stop = start[stop]
    return found[::-1]


def shard_of_stage(config: ModelConfig, shard: Shard, stage: Stage) -> Shard:
    """The rank's part of that stage of a model of `config`. Raises ConfigError."""
    return shard_of(shard, divide_layers(config, stage.count)[stage.index])


def shard_of(shard: Shard, layers: range) -> Shard:
    """Return the rank's part of a stage."""
    return replace(shard, layers=(layers.start, layers.stop))


def stage_weights(config: ModelConfig, shapes: Mapping[str, Shape], layers: range) -> dict[str, Shape]:
    """Select the `shapes` of the stage of `layers`: embedding and head belong to the first and the last stage."""
    is_first, is_last = layers.start == 0, layers.stop == config.num_layers
    first_layer = next(index for index, name in enumerate(shapes) if layer_of(name) is not None)
    needed = {}
    for index, (name, shape) in enumerate(shapes.items()):
        layer = layer_of(name)
        if layer is not None:
            is_needed = layer in layers
        elif index < first_layer:
            is_needed = is_first or (is_last and config.tie_word_embeddings)
        else:
            is_needed = is_last
        if is_needed:
            needed[name] = shape
    return needed


def blocks_of(blocks: Sequence[Block], layers: range) -> list[Block]:
    """Return the blocks of `layers`, which begin with attention, renumbered from 0 for the stage's pool."""
    kept, layer = [], -1
    for block in blocks:
        inner = block.inner
        if isinstance(inner, AttentionBlock):
            layer = inner.layer
            inner.layer -= layers.start
        if layer in layers:
            kept.append(block)
    return kept
