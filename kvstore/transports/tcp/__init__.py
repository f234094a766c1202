"""Reads over TCP."""
