"""Prometheus metrics of a worker, on the port for them."""
