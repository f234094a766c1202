"""Determines how many GPUs a model needs. Without this wing `serve` gives each worker one, unless --tp says
otherwise."""
