"""Exports spans with OpenTelemetry's SDK: a batch processor in a separate thread, OTLP over HTTP.

The SDK's environment variables apply, too: OTEL_EXPORTER_OTLP_HEADERS for a collector that needs a key, OTEL_BSP_*
for batches, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from common import VERSION

logger = logging.getLogger(__name__)


class Export:
    """A tracer provider that sends its spans. `close` it; otherwise the process does at exit."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = _Reporting(exporter)
        facts = {"service.version": VERSION}
        if "OTEL_SERVICE_NAME" not in os.environ:
            facts["service.name"] = "mini-infer-router"
        # `Tracing` has already decided which requests have spans.
        self.provider = TracerProvider(ALWAYS_ON, Resource.create(facts), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))
        atexit.register(self.close)

    def close(self) -> None:
        """Send the remaining spans, but do not wait for a collector that is down."""
        atexit.unregister(self.close)
        if self._exporter.is_failing:
            self._exporter.shutdown()
        self.provider.shutdown()


class _Reporting(SpanExporter):
    """Logs once when spans begin to be lost, and once when they no longer are; the library would log each batch."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.is_failing = False
        self._exporter = exporter
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_closed:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self.is_failing:
            logger.warning("traces are lost: the collector of --otlp-traces-endpoint does not take them")
        elif self.is_failing and not is_failing:
            logger.info("traces are taken again")
        self.is_failing = is_failing
        return result

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()


def open_export(url: str) -> Export:
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `_Reporting` logs its errors
    return Export(OTLPSpanExporter(url))
