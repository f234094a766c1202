"""Reading models: safetensors and random weights. `load.load_model` is the way in."""
