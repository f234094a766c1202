"""What stands between an engine and gRPC, for both roles: the front (asyncio, no torch) and the engine process."""
