"""The formats of quantized checkpoints, one file each; `engine/quantization/schemes.py` lists them."""
