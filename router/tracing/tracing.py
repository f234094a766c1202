"""Decides which requests are traced, and converts their spans to OpenTelemetry's after they have ended.

While a request runs, tracing does nothing: the journals of its choices contain the data of the spans.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common import VERSION
from router.journal import Journal
from router.request import GenerationRequest
from router.tracing.export import Export
from router.tracing.spans import Span, request_span


class Tracing:
    """Traces a share of the requests, `ratio`; requests with a traceparent are traced if it is marked as sampled."""

    def __init__(self, export: Export, ratio: float) -> None:
        self.export = export
        self._ratio = ratio
        self._tracer = export.provider.get_tracer("mini_infer.router", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(
        self, headers: Mapping[str, str], model: str, request: GenerationRequest, response: Response
    ) -> Response:
        """Return the response, wrapped so that it is traced after it has been sent, if the request is sampled."""
        parent = self._propagator.extract(headers, Context())
        caller = get_current_span(parent).get_span_context()
        is_sampled = caller.trace_flags.sampled if caller.is_valid else random.random() < self._ratio
        if not is_sampled:
            return response
        per_prompt = len(request.choices) // len(request.leaders)
        choices = {choice.journal: choice.index // per_prompt for choice in request.choices}
        return TracedResponse(response, lambda: self._trace(parent, request.request_id, model, choices))

    def _trace(self, parent: Context, request_id: str, model: str, choices: Mapping[Journal, int]) -> None:
        now = time.monotonic()
        span = request_span(request_id, model, choices, now)
        self._emit(span, parent, SpanKind.SERVER, time.time_ns() - int(now * 1e9))

    def _emit(self, span: Span, parent: Context, kind: SpanKind, offset: int) -> None:
        """Export a span. offset: nanoseconds from the monotonic clock to the wall clock."""
        made = self._tracer.start_span(
            span.name, parent, kind, span.attributes, start_time=offset + int(span.start * 1e9)
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        within = set_span_in_context(made, parent)
        for child in span.children:
            self._emit(child, within, SpanKind.INTERNAL, offset)
        made.end(offset + int(span.end * 1e9))


class TracedResponse(Response):
    """A response that calls `on_end` when it has been sent."""

    def __init__(self, response: Response, on_end: Callable[[], None]) -> None:
        self.background = None
        self._response = response
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._on_end()
