"""Settings of a router and of its HTTP connections."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Settings, check_not_negative, check_positive, setting, with_wings
from common.errors import ConfigError
from common.logging import FORMAT_HELP, FORMATS, LEVEL_HELP, LEVELS
from common.net.hosts import check_cluster_token

ROLES = ("prefill", "decode")


@with_wings("router")
@dataclass(frozen=True)
class RouterConfig(Settings):
    """The HTTP gateway and request router. Raises ConfigError for values that cannot work."""

    host: str = setting("127.0.0.1", "address of the HTTP server")
    port: int = setting(8000, "port of the HTTP server")
    prefill: str = setting("", "prefill workers, host:port separated by commas; a name may stand for several")
    decode: str = setting("", "decode workers, host:port separated by commas; a name may stand for several")
    model: str = setting("", "the workers' --model; only its tokenizer is read here")
    served_model_name: str = setting("", "what clients call the model; empty: its own name")
    local_prefill_tokens: int = setting(64, "a decode worker computes prompts with at most this many uncached tokens")
    max_queue: int = setting(256, "requests of a model that may wait for their first token; more get 429")
    api_key: str = setting("", "what clients send as bearer token; empty: no authentication")
    cluster_token: str = setting("", "shared secret of the services")
    request_timeout_seconds: float = setting(
        590.0, "a request ends then, with the text that it has; OpenAI's clients give up after 600 and ask again"
    )
    worker_wait_seconds: float = setting(
        30.0, "requests and open streams wait for this long when the last decode worker has gone"
    )
    drain_grace_seconds: float = setting(30.0, "time that open requests get after SIGTERM")
    max_retries: int = setting(2, "moves of one choice to another worker without a new token in between")
    log_level: str = setting("info", LEVEL_HELP, choices=LEVELS)
    log_format: str = setting("text", FORMAT_HELP, choices=FORMATS)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"--port {self.port}: choose 1 to 65535 (0: any free port)")
        if self.max_queue < 1:
            raise ConfigError("--max-queue must be at least 1")
        check_not_negative(self, "max_retries", "worker_wait_seconds", "local_prefill_tokens", "drain_grace_seconds")
        check_cluster_token(self.cluster_token)
        check_positive(self, "request_timeout_seconds")
        for role in ROLES:
            self.addresses(role)
        if not self.decode.strip():
            raise ConfigError("--decode is empty: name at least one decode worker, host:port")
        self.check_together()

    def addresses(self, role: str) -> list[tuple[str, int]]:
        """Parse the addresses of a role's workers as (host, port), in the order given."""
        text = {"prefill": self.prefill, "decode": self.decode}[role]
        addresses = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            host, _, port = item.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise ConfigError(f"--{role} {item!r}: expected host:port")
            addresses.append((host.strip("[]"), int(port)))
        return addresses


@with_wings("router", "http_settings")
@dataclass(frozen=True)
class HttpConfig(Settings):
    """Bounds on HTTP connections and on what they send. Raises ConfigError for values that cannot work."""

    idle_connection_seconds: float = setting(75.0, "a connection without a request is closed after this long")

    def __post_init__(self) -> None:
        self.check_together()
        if self.idle_connection_seconds < 1:
            raise ConfigError("--idle-connection-seconds must be at least 1")
