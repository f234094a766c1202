"""Clients' HTTP connections: protocol, limits, detection of clients that are gone, writing of chunks."""
