"""EAGLE-3 heads (arXiv:2503.01840): one layer that drafts by what three layers of the model have made of each token.

`checkpoint.py` reads a head as it is published, `head.py` computes it, and `opening.py` lets it draft next to a model
(`engine/speculation/heads`).
"""
