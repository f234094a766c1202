"""What a KV pool contains: block keys, ownership and eviction, leases, digests, and the router's prefix index."""
