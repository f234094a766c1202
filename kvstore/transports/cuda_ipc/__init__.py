"""Reads of GPU memory on the same host, mapped by CUDA's virtual memory."""
