"""All families this engine knows: importing a family's module registers it."""

from engine.mla import deepseek
from engine.models import llama, phi3, qwen2, qwen3
from engine.models.registry import ModelFamily, family_of, family_of_gguf
from engine.moe import gpt_oss, mixtral, qwen3_moe
from engine.windows import gemma3

__all__ = [
    "ModelFamily", "deepseek", "family_of", "family_of_gguf", "gemma3", "gpt_oss", "llama", "mixtral", "phi3",
    "qwen2", "qwen3", "qwen3_moe",
]  # fmt: skip
