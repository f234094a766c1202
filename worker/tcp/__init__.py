"""The port of a worker from which peers read KV over TCP."""
