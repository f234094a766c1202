"""GEMMs of few rows over 16-bit weights."""
