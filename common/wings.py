"""Wings: capabilities in packages of their own, which an installation may lack (wings.toml lists them)."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from common.errors import ConfigError


@cache
def has_wing(module: str) -> bool:
    """Whether a wing's package or module is here; nothing of it is imported."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the package around it
        return False
    return spec is not None and spec.has_location  # a folder without code has none


def require_wing(module: str, asked_by: str) -> None:
    """Raise ConfigError, which names the flag or file that asks for a wing, where the wing is not here."""
    if not has_wing(module):
        raise ConfigError(f"{asked_by} needs {module}, which this installation lacks")


def from_wing(path: str) -> Any:
    """What `path`, "module:name", names in a wing; None where the wing is not here."""
    module, name = path.split(":")
    return getattr(import_module(module), name) if has_wing(module) else None


def call_wing(path: str, *args: Any) -> Any:
    """What the function that `path` names returns for `args`; None where the wing is not here.

    Its module is imported now: many need torch or triton, which take seconds, and settings are checked before.
    """
    function = from_wing(path)
    return None if function is None else function(*args)


@cache
def wing_modules(package: str, name: str) -> tuple[ModuleType, ...]:
    """The modules of that name in the folders of a package: what its wings tell of themselves, imported."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [path for folder in folders or () for path in sorted(Path(folder).glob(f"*/{name}.py"))]
    return tuple(import_module(f"{package}.{path.parent.name}.{name}") for path in found)
