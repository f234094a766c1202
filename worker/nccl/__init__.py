"""NCCL in a worker: its pool as messages, and communicators on its GPU."""
