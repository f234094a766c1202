"""The engine process of a worker: its start and its loop."""
