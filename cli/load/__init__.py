"""A load generator for OpenAI-compatible servers: workload, client, runner, results. Knows no server's internals."""
