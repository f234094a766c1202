"""One engine: models, scheduler, runner, sampler. `LLM` and `AsyncLLM` run it in-process.

The names are loaded when they are used, because a worker's front imports this package without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM as AsyncLLM
    from engine.llm import LLM as LLM
    from engine.offline import Completion as Completion
    from engine.request import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "Completion": "engine.offline",
    "SamplingParams": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
