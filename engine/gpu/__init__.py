"""The engine on a GPU: fused kernels, CUDA graphs of whole decode steps, inputs that stay on the device."""
