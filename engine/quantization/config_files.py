"""Files that tell how weights are quantized, of tools that leave config.json as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

QUANTIZATION_FILES = {  # the method, and where in the file its fields are
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", ""),
    "quant_config.json": ("awq", ""),
}


def add_quantization(raw: dict[str, Any], directory: Path, read: Callable[[Path], dict[str, Any]]) -> None:
    """Add to the `config.json` of that folder what such a file has. read: reads JSON, raises ConfigError."""
    for name, (method, key) in QUANTIZATION_FILES.items():
        if not raw.get("quantization_config") and (directory / name).is_file():
            found = read(directory / name)
            raw["quantization_config"] = {"quant_method": method, **(found.get(key) or {} if key else found)}
