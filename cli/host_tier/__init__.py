"""The node agent of a local cluster, which keeps the host tier."""
