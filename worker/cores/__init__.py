"""Shares a host's cores among its workers. Without this wing each engine uses as many threads as there are cores."""
