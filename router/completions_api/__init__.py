"""OpenAI's API that continues texts: `/v1/completions`."""
