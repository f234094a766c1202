"""A cluster that a command starts for itself."""
