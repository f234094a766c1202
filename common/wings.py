"""Wings: optional capabilities in their own packages, which an installation may lack (wings.toml lists them)."""

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
    """Whether a wing's package or module is installed. Does not import it."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent package is missing
        return False
    return spec is not None and spec.has_location  # a folder without code has no location


def require_wing(module: str, asked_by: str) -> None:
    """Raise ConfigError if a wing is not installed. asked_by: the flag or file that needs it, for the message."""
    if not has_wing(module):
        raise ConfigError(f"{asked_by} needs {module}, which this installation lacks")


def from_wing(path: str) -> Any:
    """Return the object at `path`, "module:name", of a wing; None if the wing is not installed."""
    module, name = path.split(":")
    return getattr(import_module(module), name) if has_wing(module) else None


def call_wing(path: str, *args: Any) -> Any:
    """Call the function at `path` of a wing with `args`; return None if the wing is not installed.

    Its module is imported only now: many import torch or triton, which takes seconds, and settings are checked
    before that.
    """
    function = from_wing(path)
    return None if function is None else function(*args)


@cache
def wing_modules(package: str, name: str) -> tuple[ModuleType, ...]:
    """Import and return the modules `name` in the folders of a package, in which its wings declare something."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [path for folder in folders or () for path in sorted(Path(folder).glob(f"*/{name}.py"))]
    return tuple(import_module(f"{package}.{path.parent.name}.{name}") for path in paths)
