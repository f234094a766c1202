"""What the core asks the wings of an engine, beside what each of them is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.request import Request, SamplingParams

OnProgress = Callable[[str, float | None], None]
"""Called with what takes long before an engine is ready, and its part that is done, 0 to 1; None: that is unknown."""
Prepare = Callable[["Request"], None]
"""Completes a request that has come, as a wing has it. Raises InvalidRequestError for one that it refuses."""
Figures = Mapping[str, Sequence[float]]
"""By metric: the total of a counter or the value of a gauge, for each number that its label has; observations."""


class EngineWing:
    """Base of a wing's settings: what the engine does otherwise with them."""

    @property
    def has_drafts(self) -> bool:
        """Whether rows may have draft tokens."""
        return False

    @property
    def num_graph_sets(self) -> int:
        """How many graphs a GPU captures of each decode step."""
        return 1

    @property
    def num_prompt_graph_sets(self) -> int:
        """How many graphs a GPU captures of each step with short prompts."""
        return 1

    @property
    def is_simulated(self) -> bool:
        """Whether steps take the time of a GPU and compute nothing."""
        return False


class Counting(Protocol):
    """Has figures for the metrics that a wing declares (`common.metrics.wing_specs`)."""

    def figures(self) -> Figures:
        """Return what has been counted; observations since the last call."""
        ...


class Constraints(Protocol):
    """Makes constraints on the output of requests that name a grammar."""

    def prepare(self) -> Future[object]:
        """Load what the first constraint would wait for. The future's exception: this model takes none."""
        ...

    def prepare_request(self, request: Request) -> None:
        """See `Prepare`: begin to compile the request's constraint, if it names one, and set its `is_ready`."""
        ...

    def start(self, params: SamplingParams) -> object:
        """The constraint of a new answer, see `engine.logit_rules.filters.Constraint`."""
        ...


class Adapters(Counting, Protocol):
    """Adapters of a model: further weights that requests name."""

    def prepare_request(self, request: Request) -> None:
        """See `Prepare`: get the request's adapter ready, if it names one, and let its `is_ready` say so."""
        ...

    def tell_of_changes(self, on_change: Callable[[str, bool], None]) -> None:
        """Call `on_change` with each adapter that is in memory, or will be in a moment, and with each that leaves."""
        ...

    def runner(self, *args: Any, **named: Any) -> Any:
        """A runner of rows with and without adapters. args: of a CPU's runner. named: of a GPU's, too."""
        ...


def no_progress(what: str, part: float | None) -> None:
    """Tell nobody."""
