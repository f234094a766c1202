"""The header and the tokenizer of GGUF files, for services without an engine."""
