"""OpenAI's Responses API, translated to chat completions and back, with a bounded store of responses."""
