"""Reads the request's timeout from headers. Pure: no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping

from common.errors import InvalidRequestError

# Timeouts that OpenAI's clients announce: the JavaScript client's runs until the answer's headers, the Python
# client's between two reads. For an answer that is not streamed, both end when nobody reads it any more; a stream
# that has begun may take longer.
_CLIENT_TIMEOUTS = ("x-stainless-timeout", "x-stainless-read-timeout")
MAX_MARGIN_SECONDS = 10.0


def timeout_seconds(headers: Mapping[str, str], is_stream: bool, bound_seconds: float) -> float:
    """Return the seconds after which the request ends, at most `bound_seconds`. Raises InvalidRequestError."""
    text = headers.get("x-request-timeout")
    if text is not None:
        asked = _seconds(text)
        if asked is None:
            raise InvalidRequestError("X-Request-Timeout must be a positive number of seconds", "X-Request-Timeout")
        return min(asked, bound_seconds)
    if is_stream:
        return bound_seconds
    for name in _CLIENT_TIMEOUTS:
        asked = _seconds(headers.get(name, ""))
        if asked is not None:  # slightly less, so that an answer that is cut short still arrives in time
            bound_seconds = min(bound_seconds, asked - min(asked / 20, MAX_MARGIN_SECONDS))
    return bound_seconds


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
