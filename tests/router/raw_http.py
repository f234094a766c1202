"""Requests as bytes, for tests that control how a client sends them."""

from __future__ import annotations

import orjson

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def completion(version: str = "1.1", **fields: object) -> bytes:
    """Make a request for a completion."""
    return _with_body(HEAD.replace(b"1.1", version.encode()), fields)


def chat(text: str, **fields: object) -> bytes:
    """Make a request for a chat completion."""
    fields["messages"] = [{"role": "user", "content": text}]
    return _with_body(HEAD.replace(b"completions", b"chat/completions"), fields)


def _with_body(head: bytes, fields: dict[str, object]) -> bytes:
    body = orjson.dumps(fields)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
