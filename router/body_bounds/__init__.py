"""Limits on the memory of request bodies: bytes of all bodies being read, and values in each."""
