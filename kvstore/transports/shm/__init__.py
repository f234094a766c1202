"""Reads of shared memory on the same host."""
