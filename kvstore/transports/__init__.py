"""Transports of KV blocks between workers: one folder for each, and their common parts."""
