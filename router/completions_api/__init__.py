"""OpenAI's API of texts that are continued: `/v1/completions`."""
