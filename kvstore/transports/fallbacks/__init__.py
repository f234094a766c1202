"""Falls back to the next transport when one fails. Without this wing a pull fails, and the prompt is recomputed."""
