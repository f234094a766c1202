"""OpenTelemetry traces of requests, built in the router of what it knows when a request has ended."""
