"""NCCL in a worker: messages from and to its pool, and communicators on its GPU."""
