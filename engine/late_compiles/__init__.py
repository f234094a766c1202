"""Warnings of kernels that are compiled while requests are served."""
