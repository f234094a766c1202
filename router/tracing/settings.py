"""Settings of traces."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.config import require, setting


@dataclass(frozen=True)
class TracingSettings:
    otlp_traces_endpoint: str = setting(
        "", "send traces there by OTLP over HTTP, http://host:4318/v1/traces; empty: none"
    )
    trace_sample_ratio: float = setting(
        1.0, "part of the requests that are traced; a request with a traceparent says so itself", off=(1,)
    )

    def __post_init__(self) -> None:
        require(0 <= self.trace_sample_ratio <= 1, "--trace-sample-ratio must be between 0 and 1")
        if not self.otlp_traces_endpoint:
            return
        address = urlsplit(self.otlp_traces_endpoint)
        require(
            address.scheme in ("http", "https") and bool(address.hostname),
            f"--otlp-traces-endpoint {self.otlp_traces_endpoint!r}: expected http://host:4318/v1/traces",
        )

    @property
    def url(self) -> str:
        """The endpoint, with OTLP's default path if it has none."""
        address = urlsplit(self.otlp_traces_endpoint)
        return address._replace(path=(address.path.strip("/") and address.path) or "/v1/traces").geturl()
