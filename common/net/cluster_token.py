"""The secret that services show each other: which values of it no service starts with."""

from __future__ import annotations

from common.errors import ConfigError

EXAMPLE_PREFIX = "replace-me"  # of the values in example files, which everybody can read


def check_cluster_token(token: str) -> None:
    """Refuse an example's token, and one that cannot travel as metadata. Raises ConfigError."""
    if token.startswith(EXAMPLE_PREFIX):
        raise ConfigError(
            "the cluster token is the example's: set your own (--cluster-token, MINI_INFER_CLUSTER_TOKEN), "
            "for example what `openssl rand -hex 32` prints"
        )
    if token != token.strip() or not token.isprintable():
        raise ConfigError("the cluster token has white space at an end, or a line end: a file with a last newline?")
