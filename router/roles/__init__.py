"""POST /v1/workers/ID/role: what the router uses a worker for. Every worker can compute prompts and generate."""
