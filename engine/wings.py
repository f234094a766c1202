"""Interfaces between the engine's core and its wings that do not belong to a single wing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.request import Request, SamplingParams

OnProgress = Callable[[str, float | None], None]
"""Called with the current phase of the start, and the share of it that is done, 0 to 1, or None if unknown."""
Prepare = Callable[["Request"], None]
"""Completes a new request for a wing. Raises InvalidRequestError if the wing refuses it."""
Figures = Mapping[str, Sequence[float]]
"""By metric: a counter's totals or a gauge's values, one for each value of its label; or observations."""


class EngineWing:
    """Base of a wing's settings: how the engine behaves differently with them."""

    @property
    def has_drafts(self) -> bool:
        """Whether rows may have draft tokens."""
        return False

    @property
    def num_graph_sets(self) -> int:
        """Number of graphs that a GPU captures for each decode step."""
        return 1

    @property
    def num_prompt_graph_sets(self) -> int:
        """Number of graphs that a GPU captures for each step with short prompts."""
        return 1

    @property
    def is_simulated(self) -> bool:
        """Whether steps take a GPU's time but compute nothing."""
        return False


class Counting(Protocol):
    """Provides the values of the metrics that a wing declares (`common.metrics.wing_specs`)."""

    def figures(self) -> Figures:
        """Return the current values, and the observations since the last call."""
        ...


class Constraints(Protocol):
    """Makes constraints for the output of requests that have a grammar."""

    def prepare(self) -> Future[object]:
        """Load what the first constraint needs. If the future has an exception, the model takes no constraints."""
        ...

    def prepare_request(self, request: Request) -> None:
        """See `Prepare`: start to compile the request's grammar, if it has one, and set its `is_ready`."""
        ...

    def start(self, params: SamplingParams) -> object:
        """Return the constraint for a new output, see `engine.logit_rules.filters.Constraint`."""
        ...


class Adapters(Counting, Protocol):
    """A model's adapters, of which a request may name one."""

    def prepare_request(self, request: Request) -> None:
        """See `Prepare`: start to load the request's adapter, if it names one, and set its `is_ready`."""
        ...

    def tell_of_changes(self, on_change: Callable[[str, bool], None]) -> None:
        """Call `on_change` with each adapter that is in memory or being loaded, and with each that is evicted."""
        ...

    def runner(self, *args: Any, **named: Any) -> Any:
        """Make a runner of rows with and without adapters. args: as for a CPU's runner. named: a GPU's others."""
        ...


def no_progress(what: str, part: float | None) -> None:
    """An OnProgress that does nothing."""
