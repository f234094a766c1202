"""Chat templates in place of a model's own, and tools for models whose template takes none."""
