"""Opens tracing if an endpoint is given; without one, OpenTelemetry's SDK is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config import Settings
from common.errors import ConfigError
from router.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from router.tracing.tracing import Tracing


def open_tracing(config: Settings) -> Tracing | None:
    """Return None without an endpoint. Raises ConfigError if OpenTelemetry's packages are missing."""
    settings = config.of(TracingSettings)
    if not settings.otlp_traces_endpoint:
        return None
    try:
        from router.tracing.export import open_export
        from router.tracing.tracing import Tracing
    except ImportError as error:
        install = "pip install 'mini-infer[tracing]'"
        raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry's SDK and exporter: {install}") from error
    return Tracing(open_export(settings.url), settings.trace_sample_ratio)
