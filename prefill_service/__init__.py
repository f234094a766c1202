"""Computes prompts: each Submit ends with its first token and a KvHandle, its KV kept under a lease."""
