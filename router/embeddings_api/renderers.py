"""The answers of the three APIs, not streamed. Vectors that are compared have length 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from common.text.tokenizer import Tokenizer
from router.api.render import Renderer, RenderOptions
from router.api.text import ChoiceResult, Update, Usage
from router.embeddings_api.request import VectorRequest
from router.embeddings_api.vectors import as_base64, cosine


class VectorRenderer(Renderer):
    """An answer made of a request's vectors, which are in the order of its inputs."""

    def __init__(self, request: VectorRequest, options: RenderOptions, tokenizer: Tokenizer) -> None:
        super().__init__(options, tokenizer, "list")
        self._request = request

    def chunk(self, index: int, update: Update | ChoiceResult, usage: Usage) -> bytes:
        """See Renderer: vectors are not streamed."""
        return b""


class EmbeddingRenderer(VectorRenderer):
    """OpenAI's embeddings."""

    def __init__(self, request: VectorRequest, options: RenderOptions, tokenizer: Tokenizer, is_base64: bool) -> None:
        super().__init__(request, options, tokenizer)
        self._is_base64 = is_base64

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """See Renderer."""
        data = [
            {"object": "embedding", "index": index, "embedding": as_base64(vector) if self._is_base64 else vector}
            for index, vector in enumerate(self._request.vectors)
        ]
        return orjson.dumps(
            {"object": "list", "data": data, "model": self.options.model, "usage": _usage(usage)}
        )  # fmt: skip


class ScoreRenderer(VectorRenderer):
    """Scores of pairs. The last `num_right` inputs are paired with the inputs before them, or all with one input."""

    def __init__(self, request: VectorRequest, options: RenderOptions, tokenizer: Tokenizer, num_right: int) -> None:
        super().__init__(request, options, tokenizer)
        self._num_right = num_right

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """See Renderer."""
        vectors, num_right = self._request.vectors, self._num_right
        left, right = vectors[:-num_right], vectors[-num_right:]
        pairs = zip(left * (num_right // len(left)), right, strict=True)
        data = [{"index": i, "object": "score", "score": cosine(*pair)} for i, pair in enumerate(pairs)]
        return orjson.dumps({**self._head, "data": data, "usage": _usage(usage)})


class RerankRenderer(VectorRenderer):
    """Documents in order of similarity to the query, which is the first input."""

    def __init__(
        self, request: VectorRequest, options: RenderOptions, tokenizer: Tokenizer,
        top_n: int | None, documents: Sequence[str],
    ) -> None:  # fmt: skip
        """top_n: number of documents to return; None: all. documents: texts to repeat in results; empty: none."""
        super().__init__(request, options, tokenizer)
        self._top_n, self._documents = top_n, documents

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """See Renderer."""
        query, *vectors = self._request.vectors
        scores = [cosine(query, vector) for vector in vectors]
        nearest = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n]
        found: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in nearest]
        for result in found if self._documents else ():
            result["document"] = {"text": self._documents[result["index"]]}
        answer = {"id": self.options.request_id, "model": self.options.model, "results": found}
        return orjson.dumps({**answer, "usage": _usage(usage)})


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
