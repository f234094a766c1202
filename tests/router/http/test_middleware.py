"""What every request passes before a route: the API key, and what becomes of a route's bugs."""

from __future__ import annotations

from tests.harness.router import cluster


async def test_api_key_guards_every_route_but_health() -> None:
    async with cluster(api_key="sesame") as c:
        for path in ("/healthz", "/health", "/readyz", "/livez"):
            assert (await c.http.get(path)).status_code == 200
        paths = (
            "/v1/models",
            "/metrics",
            "/v1/cluster",
            "/explain/x",
            "/version",
            "/docs",
            "/openapi.json",
            "/nothing",
        )
        for path in (*paths, "/healthz/../v1/models", "/%68ealthz", "/v1/models?x=/healthz"):
            answer = await c.http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for value in ("Bearer wrong", "Bearer", "sesame", "Basic sesame", "Bearer sesamee"):
            assert (await c.http.get("/v1/models", headers={"authorization": value})).status_code == 401
        assert (await c.chat()).status_code == 401
        good = {"authorization": "Bearer sesame"}
        assert (await c.http.get("/v1/models", headers=good)).status_code == 200
