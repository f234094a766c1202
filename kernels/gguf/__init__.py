"""Linear layers over GGUF blocks, in C for CPUs with AVX-512 or AVX2."""
