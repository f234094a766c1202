"""Answers to browsers that ask whether a page of another origin may send a request."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from router.config import HttpConfig
from router.cors.http_settings import CorsSettings


def with_cors(app: ASGIApp, http: HttpConfig) -> ASGIApp:
    """Allow requests from pages of the origins in the settings; return `app` itself if there are none."""
    origins = http.of(CorsSettings).origins
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-mini-infer-id", "x-mini-infer-ignored", "retry-after"],
    )
