"""Hosts and addresses as servers need them: families of sockets, brackets of IPv6, who is on this machine."""

from __future__ import annotations

import ipaddress
import socket


def socket_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def with_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets, which it may have already."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`, or connects from it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
