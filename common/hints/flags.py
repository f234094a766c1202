"""Suggests a flag for an unknown one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches


def meant_by(argument: str, known: Collection[str], instead: Mapping[str, str]) -> str:
    """Return the end of the error message about `argument`; empty: no suggestion.

    known: all flags. instead: what to use in place of other programs' flags.
    """
    if not argument.startswith("-"):
        return "; a model is named with --model" if "--model" in known else ""
    flag = argument.partition("=")[0].replace("_", "-")
    if flag in instead:
        return f"; {instead[flag]}"
    near = get_close_matches(flag, known, 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
