"""What is in a KV pool: block keys, ownership and eviction, leases, digests, and who else holds which block."""
