"""Paged KV blocks: keys, pool, prefix cache, leases, and the transports that move blocks between workers."""
