"""A router's cluster and requests in a terminal: `mini-infer top` and `mini-infer explain`."""
