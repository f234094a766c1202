"""The router's metrics on a separate port."""
