"""Reads GPU memory on the same host, mapped with CUDA's virtual memory API."""
