"""--lora-modules: adapters served from the start, in vLLM's syntax."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, NoReturn

from common.errors import ConfigError

EXPECTED = 'expected NAME=FOLDER or {"name": ..., "path": ...}, separated by spaces'


class LoraModule(NamedTuple):
    """name: used by clients. folder: absolute. base: the served model that it adapts; empty: the first one."""

    name: str
    folder: Path
    base: str = ""


def folder_of(path: str) -> Path:
    """Return a folder in one spelling, since two spellings must not make two adapters."""
    return Path(path).expanduser().resolve()


def parse_lora_modules(text: str) -> list[LoraModule]:
    """Parse the setting. Raises ConfigError."""
    found: list[LoraModule] = []
    rest = text.strip()
    while rest:
        if rest.startswith("{"):
            module, rest = _from_json(rest)
        else:
            item, _, rest = rest.partition(" ")
            name, _, path = item.partition("=")
            module = LoraModule(name, folder_of(path)) if name and path else _refuse(item)
        found.append(module)
        rest = rest.strip()
    names = [module.name for module in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--lora-modules names {min(twice)!r} twice")
    return found


def _from_json(text: str) -> tuple[LoraModule, str]:
    """Return the module at the beginning of the text, and the rest."""
    try:
        fields, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        _refuse(text)
    name, path, base = (fields.pop(key, "") for key in ("name", "path", "base_model_name"))
    if fields or not all(isinstance(each, str) for each in (name, path, base)) or not (name and path):
        _refuse(text[:end])
    return LoraModule(name, folder_of(path), base), text[end:]


def _refuse(item: str) -> NoReturn:
    raise ConfigError(f"--lora-modules {item[:200]!r}: {EXPECTED}")
