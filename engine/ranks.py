"""The role of a process among the ranks that run one model: `RankContext`, or `SINGLE` for a process without others.

    seams      communication with the ranks that hold the other shards; on a GPU `GpuSeams`
    inbox      input of the rank's first layer: the embedding, or hidden states of the previous stage
    sink       receiver of the hidden states, if there is a next stage
    listener   is called with every plan before its step

The classes here are for a single process. Tensor, pipeline and expert parallelism replace them by classes that
communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor

from engine.config import EngineConfig, Stage
from kvstore.layout import WHOLE, Shard

if TYPE_CHECKING:
    from engine.layers.block import Step
    from engine.layers.forward import Forward
    from engine.loader.load import LoadedModel
    from engine.models.model import Model
    from engine.plan import ScheduledRow, StepPlan
    from kvstore.layout import PoolGeometry

S = TypeVar("S")


class Seams:
    """The communication between ranks in a model that is lowered for CPUs: here there is none."""

    def lowered(self, form: Forward[Step, Tensor], model: Model) -> Forward[Step, Tensor]:
        """Return `form`, the forward pass of this rank's `model`, with the communication between its ops."""
        return form


class Inbox:
    """The input of a model's first layer: here the embedding, which is not received."""

    def receive(self, rows: Sequence[ScheduledRow]) -> None:
        """Receive the hidden states of the next step, which has these rows."""

    def model(self, model: Model) -> Model:
        """Return the model on a GPU whose embedding is the table that `token_ids` index."""
        return model

    def token_ids(self, token_ids: Tensor) -> Tensor:
        """Return the indices (num_tokens,) into that table for a step's token ids."""
        return token_ids


class HiddenSink(Protocol):
    """The connection to the next stage."""

    def send(self, hidden: Tensor) -> None:
        """Send a step's hidden states (num_tokens, hidden), which may be overwritten once this returns."""
        ...


class PlanListener:
    """Is called with plans, on every rank. This one does nothing."""

    def on_plan(self, plan: StepPlan) -> None:
        """Execute, or queue on the current stream, what the plan does before its copies and rows."""
        assert plan.placed is None, "a plan places experts without ranks that exchange them"


EMBEDDING, NO_LISTENER = Inbox(), PlanListener()


@dataclass(frozen=True, slots=True)
class RankContext(Generic[S]):
    """A process's role, see above. S: the seams of its device."""

    seams: S
    inbox: Inbox = EMBEDDING
    sink: HiddenSink | None = None
    listener: PlanListener = NO_LISTENER

    @property
    def passes_on(self) -> bool:
        """Whether a next stage takes this one's hidden states; the last stage samples."""
        return self.sink is not None

    def pass_on(self, hidden: Tensor) -> bool:
        """Send a step's hidden states to the next stage; False if there is none."""
        if self.sink is None:
            return False
        self.sink.send(hidden)
        return True


SINGLE = RankContext(Seams())


class Ranks:
    """The ranks of a model, for its assembly: here only this process.

    shard, stage: rank 0's part of the model; no stage: all layers. num_stages: number of steps that run concurrently.
    """

    shard: Shard = WHOLE
    stage: Stage | None = None
    num_stages = 1

    def in_trials(self, loaded: LoadedModel, config: EngineConfig) -> tuple[Any, ...]:
        """Return the last arguments of `num_blocks_that_fit`, see `engine/memory_profiling/profile.py`."""
        return ()

    def num_blocks(self, loaded: LoadedModel, geometry: PoolGeometry, config: EngineConfig) -> int:
        """Return how many blocks fit on all ranks. Raises ConfigError if one of them has another model."""
        return geometry.num_blocks

    def runner(self, make: Callable[..., Any], *pool: Any) -> Any:
        """Make the engine's runner. make: makes rank 0's runner, from its RankContext if there are other ranks."""
        return make()
