"""Blocks of a model as GPU kernels, one module per form. `engine/gpu/lowering.py` chooses the form of a step."""
