"""Transfer of a worker's KV to and from peers: pools, leases, exports, loads."""
