"""Executes plans by transformers' code; scheduling, KV blocks and sampling are those of every CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from common.errors import ConfigError
from common.wings import require_wing
from engine.config import EngineConfig
from engine.cpu.forward import CpuForward, CpuForwards
from engine.cpu.runner import CpuRunner
from engine.layers.attention import AttentionBackend
from engine.layers.block import Step
from engine.layers.forward import Forward, Stream
from engine.loader.load import LoadedModel
from engine.transformers_models.model import CausalLm, TransformersModel
from kvstore.layout import PoolGeometry


class WholeModel(CpuForwards):
    """The forward pass of all steps. Rows have the bits that the GEMMs of torch give so many of them."""

    def __init__(self, code: CausalLm) -> None:
        def start(step: Step) -> Stream[Tensor]:
            return Stream(code.hidden(step))

        self._form: Forward[Step, Tensor] = Forward(start, (), lambda hidden, _: hidden, code.logits)

    def change(self, change: Callable[[CpuForward], CpuForward]) -> None:
        """Raises ConfigError: what is between transformers' layers stays there."""
        raise ConfigError("an EAGLE head reads hidden states that models by transformers' code do not give")


class TransformersRunner(CpuRunner):
    """See `engine.transformers_models.model`."""

    def _lower(self, loaded: LoadedModel, *_: Any) -> WholeModel:
        assert isinstance(loaded.model, TransformersModel)
        return WholeModel(loaded.model.code)

    def _attention(self, loaded: LoadedModel, kv_pool: Tensor, geometry: PoolGeometry) -> AttentionBackend:
        assert isinstance(loaded.model, TransformersModel)
        if not any(block.softcap or block.has_sinks for block in loaded.model.code.blocks):
            return super()._attention(loaded, kv_pool, geometry)
        require_wing("engine.windows", "a model with sinks or capped scores")
        from engine.windows.grouped_attention import GroupedAttention

        return GroupedAttention(kv_pool, geometry, loaded.model.rotary)


def runner_of(
    loaded: LoadedModel, kv_pool: Tensor, host_buffer: Tensor | None, config: EngineConfig
) -> TransformersRunner | None:
    """The runner of a model that runs by transformers' code; None: it is another one."""
    is_ours = isinstance(loaded.model, TransformersModel)
    return TransformersRunner(loaded, kv_pool, host_buffer, config) if is_ours else None
