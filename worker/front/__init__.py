"""The front of a worker: gRPC to routers and peers, and the engine process at its other side."""
