"""KV of a worker on its way to and from peers: pools, leases, exports, loads."""
