"""Finds misspelt environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from common.config import ENV_PREFIX


def misspelt_variables(env: Mapping[str, str], *classes: type[Any]) -> list[str]:
    """Return a line about each variable that is not a setting but resembles one."""
    known = {field.name.upper() for cls in classes for field in dataclasses.fields(cls)}
    given = {name.removeprefix(ENV_PREFIX) for name in env if name.startswith(ENV_PREFIX)}
    lines = []
    for name in sorted(given - known):
        if near := get_close_matches(name, known, 1, cutoff=0.75):
            lines.append(f"{ENV_PREFIX}{name} is not read: did you mean {ENV_PREFIX}{near[0]}?")
    return lines
