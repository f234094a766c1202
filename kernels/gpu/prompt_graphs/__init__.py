"""KV splits of prompts' tiles, which a graph needs for few queries after a long context."""
