"""CUDA graphs of steps with short prompts; without this package they run eagerly, as long prompts do."""
