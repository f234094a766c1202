"""Decodes the inside of a JSON string as it arrives. Invalid JSON is left unchanged."""

from __future__ import annotations

import json
import re

_HEX = "[0-9a-fA-F]"
_HIGH = f"u[dD][89abAB]{_HEX}{{2}}"  # first half of a surrogate pair
_ESCAPE = re.compile(
    rf"(\\(?:{_HIGH}(?:\\(?:u{_HEX}{{0,3}})?)?|u{_HEX}{{0,3}})?\Z)"  # incomplete: the rest is still to come
    rf"|\\(?:{_HIGH}\\u[dD][c-fC-F]{_HEX}{{2}}|u{_HEX}{{4}}|[^u])",
    re.DOTALL,
)
_SIMPLE = {r"\"": '"', r"\\": "\\", r"\/": "/", r"\b": "\b", r"\f": "\f", r"\n": "\n", r"\r": "\r", r"\t": "\t"}
_DECODER = json.JSONDecoder(strict=False)


class StringDecoder:
    """Decodes the inside of one string part by part. An incomplete escape waits for the next part."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, part: str, is_last: bool) -> str:
        part, self._held = self._held + part, ""

        def replaced(found: re.Match[str]) -> str:
            if found[1] and not is_last:
                self._held = found[0]
                return ""
            return _SIMPLE.get(found[0]) or decoded(found[0])

        return _ESCAPE.sub(replaced, part)


def decoded(inside: str) -> str:
    """Decode the inside of a whole string. Lone surrogates are replaced."""
    if "\\" not in inside:
        return inside
    try:
        value = str(_DECODER.decode(f'"{inside}"'))
    except ValueError:
        return inside
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
