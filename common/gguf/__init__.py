"""GGUF files as far as services without an engine read them: the header and the tokenizer."""
