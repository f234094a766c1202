"""Modules for multi-token prediction (MTP, arXiv:2412.19437), which some checkpoints store after their last layer.

`module.py` computes one, `opening.py` reads it from the model's files. It drafts as a head
(`engine/speculation/heads`).
"""
