"""A request for vectors: one choice for each input, of which a limited number run at a time.

A choice asks for one token, which is discarded: the vector comes with it, in place of the token's log-probabilities.
So it is handled like any other request, and ends on the worker that computes its prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from common.errors import EngineError
from protos import types_pb2 as pb
from router.api.text import Update
from router.choice import Choice, State
from router.embeddings_api.vectors import Vector
from router.metrics import RouterMetrics
from router.request import GenerationRequest, Sink

MAX_OPEN = 64  # of 2,048 inputs: other requests wait for less than a whole batch, and find room in the queue


def sampling(pooling: str) -> pb.SamplingParams:
    """Return the sampling parameters that ask a worker for a vector."""
    return pb.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1, ignore_eos=True, pooling=pooling)


class VectorRequest(GenerationRequest):
    """Collects vectors. finish: processes each as it arrives; it may raise the request's error."""

    def __init__(
        self, request_id: str, choices: list[Choice], metrics: RouterMetrics, finish: Callable[[Vector], Vector]
    ) -> None:
        super().__init__(request_id, choices, metrics)
        self.vectors: list[Vector] = [()] * len(choices)
        self._finish = finish
        self._next: Iterable[Choice] = iter(choices)

    def start(self, sink: Sink) -> None:
        """See GenerationRequest."""
        self._sink = sink
        for _ in range(min(MAX_OPEN, len(self.choices))):
            self._start_next()

    def _start_next(self) -> None:
        for choice in self._next:
            if choice.state is State.NEW:  # otherwise another choice has failed already
                choice.start(self)
                return

    def on_update(self, choice: Choice, update: Update) -> None:
        """Take a choice's vector. Raises the errors of `finish`, and EngineError if the worker sent no vector."""
        if update.finish_reason is not None:
            self.vectors[choice.index] = self._finish(_vector(update.logprobs))
            asyncio.get_running_loop().call_soon(self._start_next)
        self._sink.on_update(choice.index, update)

    def on_failure(self, choice: Choice, error: Exception) -> None:
        """Fail the whole batch: it has no use for only some of its vectors."""
        self._sink.on_failure(error)
        self._cancel()


def _vector(entries: Sequence[pb.TokenLogprobs]) -> Vector:
    if len(entries) != 1 or not entries[0].top_logprobs:
        raise EngineError("the worker gave no vector")
    return entries[0].top_logprobs[:]
