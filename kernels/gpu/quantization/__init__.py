"""GEMMs of quantized weights of 2 to 8 bits, and quantization of activations."""
