"""Drains of a worker: it finishes its open requests before it ends. Without this wing they move to other workers."""
