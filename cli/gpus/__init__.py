"""Places the workers of `serve` on several GPUs: GPUs and ranks of each worker, and the number of workers."""
