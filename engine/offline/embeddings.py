"""Vectors of prompts without services: what `LLM.embed` and `AsyncLLM.embed` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import InvalidRequestError
from engine.request import Request, RequestId, RequestOutput, SamplingParams


@dataclass(slots=True)
class Embedding:
    """The vector of one prompt. num_cached_tokens: how many of the prompt's tokens came from the prefix cache."""

    prompt_token_ids: list[int]
    vector: list[float]
    num_cached_tokens: int = 0


def vector_params(pooling: str, dimensions: int | None) -> SamplingParams:
    """What is asked of the engine. Raises InvalidRequestError."""
    if dimensions is not None and not (isinstance(dimensions, int) and dimensions >= 1):
        raise InvalidRequestError("dimensions must be an integer of at least 1", "dimensions")
    if not pooling:
        raise InvalidRequestError("pooling must be auto, last, mean or cls", "pooling")
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling)


class Vectors:
    """The outputs of one `embed` call, until every prompt has its vector."""

    def __init__(self, num_prompts: int, normalize: bool, dimensions: int | None) -> None:
        self.num_open = num_prompts
        self._normalizes, self._dimensions = normalize, dimensions
        self._found: dict[RequestId, list[float]] = {}

    def add(self, output: RequestOutput) -> None:
        """Take a prompt's one output. Raises InvalidRequestError for more dimensions than it has."""
        [entry] = output.logprobs
        vector = torch.tensor(entry.top_logprobs)
        if (self._dimensions or 0) > len(vector):
            raise InvalidRequestError(f"dimensions: the model's vectors have {len(vector)}", "dimensions")
        vector = vector[: self._dimensions]
        if self._normalizes:
            vector = torch.nn.functional.normalize(vector, dim=0)
        self._found[output.request.request_id] = vector.tolist()
        self.num_open -= 1

    def embeddings(self, requests: Sequence[Request]) -> list[Embedding]:
        """Embeddings in the order of `requests`, all of which have a vector."""
        return [
            Embedding(each.prompt_token_ids, self._found[each.request_id], each.num_cached_tokens)
            for each in requests
        ]
