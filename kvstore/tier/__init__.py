"""The host-memory tier behind a pool, and the node agent that keeps it for all workers of a host."""
