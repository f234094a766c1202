"""Pages that vLLM's users expect of a server: readiness, load, settings, tokenizer."""
