"""Bounds on the memory of request bodies: bytes of all that are being read, and values of each."""
