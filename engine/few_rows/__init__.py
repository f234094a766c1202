"""Steps of few rows on a GPU, by GEMMs that read weights fastest: the ops of blocks, and which GEMM a layer takes."""
