"""A client of an OpenAI-compatible server: models, streamed answers, readable errors."""
