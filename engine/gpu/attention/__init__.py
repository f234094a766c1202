"""Attention on a GPU: `backend.py` defines the interfaces, `grouped.py` implements grouped-query attention."""
