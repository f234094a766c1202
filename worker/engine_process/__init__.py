"""The engine process of a worker: start and main loop."""
