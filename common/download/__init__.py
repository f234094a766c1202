"""Models by their id on a hub. Without this wing a model is a folder, a file or the default."""
