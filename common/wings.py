"""Wings: capabilities in packages of their own, which an installation may lack (wings.toml lists them)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

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
