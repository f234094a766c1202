"""The router's metrics on a port of their own."""
