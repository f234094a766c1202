"""Pages of other origins."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from router.config import HttpConfig
from router.cors.http_settings import CorsSettings
from tests.harness.router import cluster

ORIGIN = "https://chat.example.org"


def cors(origins: str) -> HttpConfig:
    settings: dict[str, Any] = {"cors_origins": origins}  # of a wing: type checkers do not know them
    return HttpConfig(**settings)


async def test_pages_of_listed_origins_may_ask() -> None:
    async with cluster(http=cors(f"{ORIGIN},http://localhost:3000")) as c:
        headers = "authorization,content-type"
        asking = {"access-control-request-method": "POST", "access-control-request-headers": headers}
        before = await c.http.options("/v1/chat/completions", headers={"origin": ORIGIN, **asking})
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in before.headers["access-control-allow-headers"]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for fields in ({}, {"stream": True}, {"max_tokens": 0}):
            answer = await c.http.post("/v1/chat/completions", json={**body, **fields}, headers={"origin": ORIGIN})
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "retry-after" in answer.headers["access-control-expose-headers"]
        other = {"origin": "https://evil.example.org"}
        assert (await c.http.options("/v1/models", headers={**other, **asking})).status_code == 400
        assert "access-control-allow-origin" not in (await c.http.get("/v1/models", headers=other)).headers


async def test_no_page_may_ask_unless_allowed_and_a_key_stays_a_key() -> None:
    async with cluster() as c:
        answer = await c.http.get("/v1/models", headers={"origin": ORIGIN})
        assert not [name for name in answer.headers if name.startswith("access-control")]
    async with cluster(http=cors("*"), api_key="sesame") as c:
        answer = await c.http.get("/v1/models", headers={"origin": ORIGIN})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "*"


def test_settings() -> None:
    for origins in ("example.org", "https://x/path", "https://*.x"):
        with pytest.raises(ConfigError, match="--cors-origins"):
            cors(origins)
    assert cors("https://a, http://b:1").of(CorsSettings).origins == ["https://a", "http://b:1"]
