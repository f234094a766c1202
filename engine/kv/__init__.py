"""Block bookkeeping and the memory of the KV pool of one engine."""
