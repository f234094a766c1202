"""The shell around one engine: a front (asyncio, gRPC, no torch) and a rank (torch, step loop).

Prefill and decode services differ only in their gRPC service and in what a Submit means, so both use this.
"""
