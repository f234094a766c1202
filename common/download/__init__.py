"""Models by their id on a hub. Without it a model is a folder or a file, or the default."""
