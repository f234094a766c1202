"""What a process is among the ranks that run one model, as one value: `RankContext`; `SINGLE` is one that is alone.

    seams      where its shard of the weights meets those of other ranks; on a GPU `GpuSeams`
    inbox      what the first of its layers read: the embedding, or hidden states of the stage before
    sink       where hidden states go that another stage continues with
    listener   is told of every plan before its step

The classes here are those of a process that is alone. What ranks exchange is the business of tensor, pipeline and
expert parallelism, whose classes take their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor

from engine.config import Stage
from kvstore.layout import WHOLE, Shard

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.layers.block import AddNorm, Block, Step
    from engine.layers.linear import LinearLayer
    from engine.loader.load import LoadedModel
    from engine.models.model import Model
    from engine.plan import ScheduledRow, StepPlan
    from kvstore.layout import PoolGeometry

X = TypeVar("X")
S = TypeVar("S")
LookUp = Callable[[Tensor], Tensor]
"""From token ids (n,) to rows (n, hidden)."""


class Seams:
    """What goes on between ranks in a lowered model. Ops in between know nothing of it."""

    def embedding(self, model: Model) -> LookUp:
        """Look up rows of the whole model's embedding."""
        return model.embed

    def start(self, x: Tensor) -> Tensor:
        """The rows, dimension 0 of the first residual, that this rank keeps."""
        return x

    def fold(self, add_norm: AddNorm[X], before: Block | None) -> AddNorm[X]:
        """`add_norm` of what the block before leaves pending on this rank."""
        return add_norm

    def body(self, block: Block) -> Callable[[Tensor, Step], Tensor]:
        """The block, from normed rows of this rank to what the next fold takes."""
        return block.__call__

    def end(self, x: Tensor, step: Step) -> Tensor:
        """All rows (num_tokens, hidden) after the final norm."""
        return x

    def head(self, model: Model) -> LinearLayer:
        """Compute logits over the whole vocabulary."""
        return model.head


class Inbox:
    """What a model's first layers read: the embedding, which nobody sends."""

    def receive(self, rows: Sequence[ScheduledRow]) -> None:
        """Take the hidden states of the next step, of these rows."""

    def look_up(self, embedding: LookUp) -> LookUp:
        """What stands for the embedding. The rows that it gives may be changed in place."""
        return embedding

    def model(self, model: Model) -> Model:
        """The model with what stands for its embedding, where the ids of tokens are `token_ids`."""
        return model

    def token_ids(self, token_ids: Tensor) -> Tensor:
        """What stands for a step's token ids (num_tokens,)."""
        return token_ids


class HiddenSink(Protocol):
    """The next stage."""

    def send(self, hidden: Tensor) -> None:
        """Send a step's (num_tokens, hidden), which may be overwritten as soon as this returns."""
        ...


class PlanListener:
    """Is told of plans, on every rank. This one has nothing to do."""

    def on_plan(self, plan: StepPlan) -> None:
        """Do what the plan says before its copies and its rows, or queue that on the current stream."""
        assert plan.placed is None, "a plan places experts without ranks that exchange them"


EMBEDDING, NO_LISTENER = Inbox(), PlanListener()


@dataclass(frozen=True, slots=True)
class RankContext(Generic[S]):
    """See the module. S: the seams of a device."""

    seams: S
    inbox: Inbox = EMBEDDING
    sink: HiddenSink | None = None
    listener: PlanListener = NO_LISTENER

    @property
    def passes_on(self) -> bool:
        """Whether another stage continues with this one's hidden states, and samples."""
        return self.sink is not None

    def pass_on(self, hidden: Tensor) -> bool:
        """Send a step's hidden states to the next stage. False: there is none."""
        if self.sink is None:
            return False
        self.sink.send(hidden)
        return True


SINGLE = RankContext(Seams())


class Ranks:
    """The ranks of a model as its assembly sees them: here this process alone.

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
