"""GEMMs of few rows over weights of 16 bits."""
