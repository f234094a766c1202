"""The engine process of a worker: its loop, its heartbeat, its share of the host's cores."""
