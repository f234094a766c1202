"""Modules for multi-token prediction (MTP, arXiv:2412.19437), which some checkpoints hold after their last layer.

`module.py` computes one, `opening.py` reads it from the model's own files. It drafts as heads do
(`engine/speculation/heads`).
"""
