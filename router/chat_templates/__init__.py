"""Chat templates that replace a model's own, and tools for models whose template supports none."""
