"""The engine process of a worker: its loop and its heartbeat."""
