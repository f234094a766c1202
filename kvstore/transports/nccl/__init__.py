"""Reads of GPU memory through NCCL."""
