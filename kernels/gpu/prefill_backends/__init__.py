"""Contiguous K and V for libraries that cannot read the paged pool."""
