"""Masks, biases and penalties of rows of logits."""
