"""KV handles: where the KV of a prompt is, and which bytes of it a reader with other shards needs."""
