"""GET /v1/cluster: the workers and their state, for operators and scripts."""
