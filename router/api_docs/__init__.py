"""GET /docs and GET /openapi.json: the API as a page and as OpenAPI."""
