"""Suggests a path for a request to one that does not exist."""
