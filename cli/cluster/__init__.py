"""A local cluster of child processes: its plan, its services' lives, and `mini-infer serve`."""
