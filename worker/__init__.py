"""The worker around an engine, for both roles: the front (asyncio, gRPC, no torch) and the engine process."""
