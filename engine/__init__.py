"""One engine: models, scheduler, runner, sampler. `LLM` and `AsyncLLM` run it in-process.

The names are loaded when they are used, because a worker's front imports this package without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.offline.async_llm import AsyncLLM as AsyncLLM
    from engine.offline.embeddings import Embedding as Embedding
    from engine.offline.llm import LLM as LLM
    from engine.offline.text_engine import Completion as Completion
    from engine.request import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "engine.offline.llm",
    "AsyncLLM": "engine.offline.async_llm",
    "Completion": "engine.offline.text_engine",
    "Embedding": "engine.offline.embeddings",
    "SamplingParams": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
