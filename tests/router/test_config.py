"""Settings that cannot work are refused, and addresses are read."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from router.config import RouterConfig


@pytest.mark.parametrize(
    "fields",
    [
        {"decode": ""},
        {"decode": "host"},
        {"decode": "host:0"},
        {"decode": "host:99999"},
        {"decode": ":80"},
        {"decode": "a:1", "prefill": "b:x"},
        {"decode": "a:1", "port": -1},
        {"decode": "a:1", "max_queue": 0},
        {"decode": "a:1", "max_retries": -1},
        {"decode": "a:1", "request_timeout_seconds": 0.0},
    ],
)
def test_settings_that_cannot_work(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RouterConfig(**fields)  # type: ignore[arg-type]


def test_addresses() -> None:
    config = RouterConfig(decode="a:1, [::1]:2 ,b.c:3,")
    assert config.addresses("decode") == [("a", 1), ("::1", 2), ("b.c", 3)]
    assert config.addresses("prefill") == []
