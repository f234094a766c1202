"""The port for Prometheus and for HTTP health checks."""
