"""The node agent of a local cluster, which owns the host tier."""
