"""Pages that vLLM's users ask a server for: is it there, how busy, with which settings, which tokenizer."""
