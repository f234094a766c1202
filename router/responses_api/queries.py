"""Parses the query arguments of GET requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError

DEFAULT_LIMIT = 20  # default and maximum of input items per page, as in OpenAI's API
MAX_LIMIT = 100
MAX_DIGITS = 10


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of a list of input items that a query asks for. Raises InvalidRequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", "order")
    limit = whole_number(query, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    left = list(items if order == "asc" else reversed(items))
    if after := query.get("after"):
        ids = [item["id"] for item in left]
        if after not in ids:
            raise InvalidRequestError(f"after: the response has no input item {after[:64]!r}", "after")
        left = left[ids.index(after) + 1 :]
    shown = left[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(left) > limit}


def first_event(query: Mapping[str, str]) -> int | None:
    """Return the sequence number of the first event that a query asks for; None: it asks for no events.

    Raises InvalidRequestError.
    """
    stream = query.get("stream", "false").lower()
    if stream not in ("true", "false", "1", "0"):
        raise InvalidRequestError("stream must be true or false", "stream")
    if stream in ("true", "1"):
        return whole_number(query, "starting_after", -1, 0, (1 << 31) - 1) + 1
    if "starting_after" in query:
        raise InvalidRequestError("starting_after needs stream=true", "starting_after")
    return None


def whole_number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return an argument within these bounds. Raises InvalidRequestError."""
    text = query.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    if not (is_number and least <= int(text) <= most):
        raise InvalidRequestError(f"{name} must be a whole number from {least} to {most}", name)
    return int(text)
