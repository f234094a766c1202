"""An OTLP collector on a free port, which keeps the spans that it is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.harness.waiting import wait_until


@dataclass
class Received:
    """One span, its times in seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: str
    service: str
    kind: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list)
    status: int = 200

    def trace(self, trace_id: str) -> list[Received]:
        """Wait for a trace's root; return its spans in order. One batch has all of them."""
        wait_until(lambda: any(s.trace_id == trace_id and s.name == "llm_request" for s in self.spans))
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda s: (s.start, s.end))

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            self.spans += [
                Received(
                    span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9, _attributes(span.attributes),
                    span.status.message if span.status.code == 2 else "", service, span.kind,
                )
                for scope in resource.scope_spans for span in scope.spans
            ]  # fmt: skip


def children(spans: list[Received], parent: Received) -> list[Received]:
    return [span for span in spans if span.parent_id == parent.span_id]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_taken = self.path == "/v1/traces" and collector.status == 200
            if is_taken:
                collector.take(body)
            self.send_response(200 if is_taken else max(collector.status, 400))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
