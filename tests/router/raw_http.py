"""Requests as bytes, for tests that say how a client sends them."""

from __future__ import annotations

import orjson

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def completion(version: str = "1.1", **fields: object) -> bytes:
    """One that asks for a text."""
    body = orjson.dumps(fields)
    return HEAD.replace(b"1.1", version.encode()) + b"content-length: %d\r\n\r\n" % len(body) + body
