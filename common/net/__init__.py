"""The network side of every service: gRPC set-up, health, the cluster token, addresses."""
