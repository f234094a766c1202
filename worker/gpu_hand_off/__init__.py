"""KV hand-off from and to GPU memory. Without this wing a worker on a GPU computes all its prompts itself."""
