"""A local cluster of child processes: its plan, the supervision of its services, and `mini-infer serve`."""
