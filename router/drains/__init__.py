"""POST /v1/workers/ID/drain and undrain: take a worker out of service. A worker that stops drains without them."""
