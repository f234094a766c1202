"""gRPC surface. The .proto files are the source; `make protos` writes the stubs beside them."""
