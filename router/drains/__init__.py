"""POST /v1/workers/ID/drain and undrain: taking a worker out of service. A worker's own end needs none of this."""
