"""The host-memory tier below a pool, and the node agent that owns it for all workers of a host."""
