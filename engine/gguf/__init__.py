"""Models in GGUF files: their config, and their weights, dequantized or in blocks of few bits."""
