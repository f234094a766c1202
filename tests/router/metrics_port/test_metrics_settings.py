"""Metrics ports that cannot work are refused."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from router.config import RouterConfig
from router.metrics_port.port import open_metrics_port


def test_a_port_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="--metrics-port 65536: choose 1 to 65535"):
        RouterConfig(decode="a:1", metrics_port=65536)  # type: ignore[call-arg]


def test_the_port_of_the_api() -> None:
    with pytest.raises(ConfigError, match="--metrics-port 8000: choose 1 to 65535, not --port"):
        open_metrics_port(RouterConfig(decode="a:1", metrics_port=8000), bytes)  # type: ignore[call-arg]
