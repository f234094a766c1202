"""Linear layers over the blocks of GGUF files, in C for CPUs with AVX-512 or AVX2."""
