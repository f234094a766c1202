"""Transports of KV blocks between workers: a folder for each, and what they share."""
