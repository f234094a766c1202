"""Checks who may use the routes that change a cluster."""
