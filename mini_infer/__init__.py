"""The Python API: `LLM` and, for asyncio, `AsyncLLM` run one engine in this process; `grammar` makes grammars.

Names are loaded when they are used, because torch takes seconds to import.
"""

from typing import TYPE_CHECKING, Any

from common import VERSION as __version__

if TYPE_CHECKING:
    from common.grammar import grammar
    from engine import LLM, AsyncLLM, Completion, Embedding, SamplingParams

__all__ = ["LLM", "AsyncLLM", "Completion", "Embedding", "SamplingParams", "__version__", "grammar"]


def __getattr__(name: str) -> Any:
    if name == "grammar":
        from common.grammar import grammar

        return grammar
    if name in __all__:
        import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'mini_infer' has no attribute {name!r}")
