"""Multi-head latent attention (MLA) of the DeepSeek families, on CPUs and GPUs."""
