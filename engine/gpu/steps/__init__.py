"""Steps on the device: inputs, state between steps, sampling, and CUDA graphs of whole steps."""
