"""EAGLE-3 heads (arXiv:2503.01840): one layer that drafts from the hidden states of three of the model's layers.

`checkpoint.py` reads a published head, `head.py` computes it, and `opening.py` lets it draft next to a model
(`engine/speculation/heads`).
"""
