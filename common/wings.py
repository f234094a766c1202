"""Wings: capabilities in packages of their own, which an installation may lack (wings.toml lists them)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_wing(package: str) -> bool:
    """Whether a wing's package is here; nothing of it is imported."""
    return find_spec(package) is not None
