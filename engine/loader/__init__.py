"""Reads models: safetensors and random weights. Entry point: `load.load_model`."""
