"""All families this engine knows. Importing a family's module registers it; wings that are absent are skipped."""

from importlib import import_module

from common.wings import has_wing
from engine.models import llama
from engine.models.registry import ModelFamily, absent, family_of

__all__ = ["ModelFamily", "family_of", "llama"]
FAMILIES = (
    "engine.fused.phi3:FUSED",
    "engine.mla.deepseek:deepseek",
    "engine.moe.gpt_oss:gpt_oss",
    "engine.moe.mixtral:mixtral",
    "engine.moe.qwen2_moe:qwen2_moe",
    "engine.moe.qwen3_moe:qwen3_moe",
    "engine.post_norms.gemma3:gemma3",
    "engine.qwen.qwen2:adapt_config",
    "engine.qwen.qwen3:adapt_config",
)
for module in (path.partition(":")[0] for path in FAMILIES):
    if has_wing(module):
        import_module(module)
    else:
        absent.append(module)
