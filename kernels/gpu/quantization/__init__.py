"""GEMMs over weights of 8 and 4 bits, and quantization of activations."""
