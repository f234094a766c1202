"""Drains of a worker, which finishes its open requests before it ends. Without it they move to other workers."""
