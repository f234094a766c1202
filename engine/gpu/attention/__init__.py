"""Attention on a GPU: `backend.py` has the seams, `grouped.py` and `paged.py` what works for most models."""
