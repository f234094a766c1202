"""Models in GGUF files: their config, and their weights, dequantized or as 4-bit groups."""
