"""The ranks of a model as its assembly sees them: here this process alone. Tensor parallelism has others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.ranks import Stage
from kvstore.layout import WHOLE, Shard

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.loader.load import LoadedModel
    from kvstore.layout import PoolGeometry


class Ranks:
    """This process alone.

    shard, stage: what rank 0 has of the model; no stage: all layers. num_stages: steps that run at the same time.
    """

    shard: Shard = WHOLE
    stage: Stage | None = None
    num_stages = 1

    def in_trials(self, loaded: LoadedModel, config: EngineConfig) -> tuple[Any, ...]:
        """What of the ranks `num_blocks_that_fit` has to know, see `engine/memory_profiling/profile.py`."""
        return ()

    def num_blocks(self, loaded: LoadedModel, geometry: PoolGeometry, config: EngineConfig) -> int:
        """Blocks for which all ranks have room. Raises ConfigError when one of them holds another model."""
        return geometry.num_blocks

    def runner(self, make: Callable[..., Any], *pool: Any) -> Any:
        """Make the engine's runner. make: rank 0's own, from its RankContext if there are others."""
        return make()
