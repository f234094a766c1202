"""GPU ops of a model's blocks. `engine/gpu/lowering.py` chooses among them for each class of steps."""
