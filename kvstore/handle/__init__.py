"""KV handles: where a prompt's KV lies, and which bytes of it a reader with other shards needs."""
