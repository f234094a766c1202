"""Reports what a worker is doing while it starts."""
