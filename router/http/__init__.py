"""HTTP: connections and their bounds, routes, errors in the shape of OpenAI, server-sent events."""
