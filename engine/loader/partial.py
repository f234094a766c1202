"""Build a rank's or a stage's part of a model, and models whose linear layers are converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from common.wings import call_wing
from engine.config import EngineConfig
from engine.layers.block import Block
from engine.loader.checkpoint import Shape
from engine.loader.conversion import Conversion
from engine.loader.partial_weights import PartialWeights
from engine.loader.source import Source
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.wings import OnProgress
from kvstore.layout import Shard


def build_part(
    source: Source, skeleton: Model, conversion: Conversion | None, engine_config: EngineConfig, shard: Shard,
    dtype: torch.dtype, device: torch.device, on_progress: OnProgress,
) -> tuple[Model, str, dict[str, str]]:  # fmt: skip
    """See `engine.loader.load._build`. skeleton: of the whole model. Raises ConfigError."""
    kept = frozenset[str]() if conversion is None else conversion.keep(skeleton)
    config = source.config
    make: Callable[..., PartialWeights] = PartialWeights
    if shard.size > 1:
        from engine.tensor_parallel.rank_config import config_of_rank
        from engine.tensor_parallel.weights import RankWeights

        make = partial(RankWeights, shard, _shapes_of(source, config))
        config = config_of_rank(config, engine_config, shard)
    layers = range(*(shard.layers or (0, config.num_layers)))
    needed = _shapes_of(source, config, kept)
    if shard.layers is not None:
        from engine.pipeline_parallel.staged import blocks_of, stage_weights

        needed = stage_weights(config, needed, layers)
    weights = make(source.weights, needed, kept=kept, on_progress=on_progress, dtype=dtype, device=device)
    if conversion is not None:
        conversion.start(weights.parts, weights.count)

    def finish(block: Block) -> None:
        if block.norm.is_meta:  # of another stage
            return
        if conversion is None or conversion.leaves_attention_plain:
            call_wing("engine.eight_bit_kv.scales:fold_if_asked", engine_config, block.inner)
        if conversion is not None:
            conversion.convert(block)

    model = source.family.build(config, weights, finish)
    if shard.layers is not None:
        model.blocks = blocks_of(model.blocks, layers)
        model.config = replace(config, num_layers=len(layers))
    has_head = layers.stop == config.num_layers
    if conversion is None:
        if has_head:
            call_wing("engine.cpu_gemms.gemms:give_float32_logits", model)
        return model, "none", {}
    if has_head:
        conversion.finish(model)
    conversion.end()
    return model, conversion.quant_mode, conversion.identity


def _shapes_of(source: Source, config: ModelConfig, kept: frozenset[str] = frozenset()) -> dict[str, Shape]:
    """Shapes of all weights that a model of `config` takes.

    kept: those that it takes if it has a layer of them.
    """
    skeleton, shapes = source.family.skeleton(config)
    if not kept:
        return shapes
    held = {name for ref in skeleton.linears() for name in ref.layer.names}
    return {name: shape for name, shape in shapes.items() if name not in kept or name in held}
