"""Settings of a router's adapters."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import setting
from common.lora.modules import parse_lora_modules


@dataclass(frozen=True)
class LoraModuleSettings:
    lora_modules: str = setting(
        "", "LoRA adapters served as models from the start, NAME=FOLDER each, or as vLLM's JSON objects", many=True
    )
    lora_dir: str = setting(
        "",
        "folder whose subfolders are LoRA adapters of the first model, served under their names while they are there",
    )

    def __post_init__(self) -> None:
        parse_lora_modules(self.lora_modules)  # raises ConfigError
