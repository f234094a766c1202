"""OpenAI's API for continuing texts: `/v1/completions`."""
