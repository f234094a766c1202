"""Attention for chunks of prompts on a GPU: `backend.py` is the seam, `paged.py` the backend that always works."""
