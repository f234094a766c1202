"""Copies of KV blocks on a GPU."""
