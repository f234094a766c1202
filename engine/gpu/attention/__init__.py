"""Attention on a GPU: `backend.py` has the seams, `grouped.py` what works for most models."""
