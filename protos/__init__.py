"""gRPC surface. The .proto files are the source; build_stubs.py writes the stubs beside them."""
