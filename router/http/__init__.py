"""HTTP: routes, request bodies, errors in OpenAI's shape, server-sent events."""
