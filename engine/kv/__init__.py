"""Blocks of requests and the memory of their KV, inside one engine."""
