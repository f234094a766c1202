"""Hand-off of KV whose pool is in GPU memory. Without it a worker on a GPU computes all of its prompts itself."""
