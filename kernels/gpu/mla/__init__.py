"""Multi-head latent attention (MLA) over latents in the pool."""
