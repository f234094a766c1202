"""The router's connections to workers, and what it knows of each."""
