"""Hosts and addresses of servers: socket families, IPv6 brackets, and checks of who may reach a server."""

from __future__ import annotations

import ipaddress
import socket

from common.errors import ConfigError

EXAMPLE_PREFIX = "replace-me"  # prefix of cluster tokens in example files, which everybody can read


def socket_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets. host: with or without brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine can reach or connect from."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, token: str) -> None:
    """Raise ConfigError for an internal port that other hosts can reach and no token protects."""
    if not (token or is_loopback(host)):
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --cluster-token (MINI_INFER_CLUSTER_TOKEN) on "
            "every service, or bind to 127.0.0.1"
        )


def check_cluster_token(token: str) -> None:
    """Raise ConfigError for the token of an example, or one that gRPC metadata cannot carry."""
    if token.startswith(EXAMPLE_PREFIX):
        raise ConfigError(
            "the cluster token is the example's: set your own (--cluster-token, MINI_INFER_CLUSTER_TOKEN), "
            "for example what `openssl rand -hex 32` prints"
        )
    if token != token.strip() or not token.isprintable():
        raise ConfigError("the cluster token has white space at an end, or a line end: a file with a last newline?")
