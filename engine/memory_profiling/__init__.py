"""KV pools as large as a GPU has room for, found by running the largest steps before the pool exists."""
