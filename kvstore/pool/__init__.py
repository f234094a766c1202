"""Contents of a KV pool: block keys, ownership and eviction, leases, digests, and the index of all pools."""
