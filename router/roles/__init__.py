"""POST /v1/workers/ID/role: changes what the router uses a worker for. Every worker can do both."""
