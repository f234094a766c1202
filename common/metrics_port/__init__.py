"""The port for Prometheus and for health checks by HTTP."""
