"""GET /v1/cluster: the workers and what they do, for operators and their scripts."""
