"""A client of an OpenAI-compatible server: models, answers that stream, errors as a person reads them."""
