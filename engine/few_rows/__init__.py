"""Steps of few rows on a GPU with the GEMMs that read weights fastest: ops of blocks, and each layer's GEMM."""
