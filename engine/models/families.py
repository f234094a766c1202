"""All families this engine knows: importing a family's module registers it."""

from engine.models import deepseek, gemma3, gpt_oss, llama, mixtral, qwen2, qwen3, qwen3_moe
from engine.models.registry import ModelFamily, family_of, family_of_gguf

__all__ = [
    "ModelFamily", "deepseek", "family_of", "family_of_gguf", "gemma3", "gpt_oss", "llama", "mixtral", "qwen2",
    "qwen3", "qwen3_moe",
]  # fmt: skip
