"""Benchmarks of the Triton kernels, one file per kernel: `python -m benchmarks.kernels.bench_<name>`, on a GPU."""
