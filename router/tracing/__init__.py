"""OpenTelemetry traces of requests, built in the router when a request has ended."""
