"""All families this engine knows: importing a family's module registers it."""

from engine.models import llama, qwen2, qwen3
from engine.models.registry import ModelFamily, family_of, family_of_gguf

__all__ = ["ModelFamily", "family_of", "family_of_gguf", "llama", "qwen2", "qwen3"]
