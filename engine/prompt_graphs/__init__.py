"""CUDA graphs for steps with short prompts; without this package these run eagerly, as long prompts do."""
