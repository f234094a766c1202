"""The Python API: `LLM` and, for asyncio, `AsyncLLM` run one engine in this process; `grammar` makes grammars.

Names are loaded when they are used, because torch takes seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

from common import VERSION as __version__

if TYPE_CHECKING:
    from common.grammar import grammar
    from engine.offline.async_llm import AsyncLLM
    from engine.offline.embeddings import Embedding
    from engine.offline.llm import LLM
    from engine.offline.text_engine import Completion
    from engine.request import SamplingParams

__all__ = ["LLM", "AsyncLLM", "Completion", "Embedding", "SamplingParams", "__version__", "grammar"]
_HOMES = {
    "LLM": "engine.offline.llm",
    "AsyncLLM": "engine.offline.async_llm",
    "Completion": "engine.offline.text_engine",
    "Embedding": "engine.offline.embeddings",
    "SamplingParams": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name == "grammar":
        return importlib.import_module("common.grammar.grammar")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mini_infer' has no attribute {name!r}")
