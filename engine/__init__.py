"""One engine: models, scheduler, runner, sampler. `from engine import LLM, SamplingParams` runs it in-process.

The names are loaded when they are used, because a worker's front imports this package without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM as LLM
    from engine.llm import Completion as Completion
    from engine.request import SamplingParams as SamplingParams

_HOMES = {"LLM": "engine.llm", "Completion": "engine.llm", "SamplingParams": "engine.request"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
