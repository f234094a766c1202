"""Reads GPU memory through NCCL."""
