"""Prometheus metrics of a worker, on a separate port."""
