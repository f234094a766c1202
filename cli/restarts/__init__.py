"""Restarts services of a local cluster that end."""
