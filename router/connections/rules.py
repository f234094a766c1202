"""Checks on the head of an HTTP request beyond those of the parser. Pure functions on plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence

from router.http.errors import HttpError

MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 << 10  # of a request without its body
MAX_CHUNKS = 1 << 16  # of a body in chunked encoding
CHUNK_FRAMING_BYTES = 8  # allowed overhead of a chunk: a size in four digits and two line ends
Headers = Sequence[tuple[bytes, bytes]]

_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-fv:.]+\])(?::[0-9]*)?")


def check_head(version: str, headers: Headers) -> None:
    """Refuse what RFC 9112 requires to refuse because two servers may read it differently. Raises HttpError."""
    if version not in ("1.0", "1.1"):
        raise HttpError(505, "this server speaks HTTP/1.1 and HTTP/1.0")
    hosts = codings = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST.fullmatch(value.strip(b" \t")):
                raise HttpError(400, "the Host header is not a host and, at most, a port")
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip(b" \t").lower() != b"chunked":
                raise HttpError(501, "the only Transfer-Encoding that this server knows is chunked")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise HttpError(400, "a request must have exactly one Host header")
    if codings > 1 or (codings and version == "1.0"):
        raise HttpError(400, "the Transfer-Encoding is doubled, or does not exist in this version of HTTP")


def head_bytes(url: bytes, headers: Headers) -> int:
    """Return the approximate size of the head on the wire."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
