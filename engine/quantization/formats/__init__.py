"""One file for each format of quantized checkpoints; `engine/quantization/schemes.py` lists them."""
