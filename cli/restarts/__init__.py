"""Restarts of the services of a local cluster."""
