"""Tables of requests with several KV groups, or with entries that hold no block."""
