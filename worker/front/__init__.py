"""The front of a worker: it connects routers and peers, by gRPC, with the engine process."""
